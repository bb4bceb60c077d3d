# SPDX-License-Identifier: Apache-2.0
"""A client of vLLM servers and a journal, for programs to share; see README.md."""

from common.answers import Answer, Choice, ContinuationScore, Model, Scores, top_ids
from common.async_client import AsyncClient
from common.client import Client
from common.errors import ClientError, ServerGone
from common.journal import Journal, JournalError

__all__ = [
    "Answer",
    "AsyncClient",
    "Choice",
    "Client",
    "ClientError",
    "ContinuationScore",
    "Journal",
    "JournalError",
    "Model",
    "Scores",
    "ServerGone",
    "top_ids",
]
