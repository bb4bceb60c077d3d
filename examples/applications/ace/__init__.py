# SPDX-License-Identifier: Apache-2.0
"""A playbook that a model writes for itself, with one client for three ways of running
the model; see README.md."""

from common import ClientError, ServerGone

from ace.chat import Completion, Sampling
from ace.client import LLMClient
from ace.playbook import Playbook

__all__ = [
    "ClientError",
    "Completion",
    "LLMClient",
    "Playbook",
    "Sampling",
    "ServerGone",
]
