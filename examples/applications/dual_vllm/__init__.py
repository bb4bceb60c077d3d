# SPDX-License-Identifier: Apache-2.0
"""Sampling from between two models that two vLLM servers serve; see README.md."""

from common import ClientError, ServerGone

from dual_vllm.config import CoordinatorConfig
from dual_vllm.coordinator import DualVLLMCoordinator, GenerationOutput, Step

__all__ = [
    "ClientError",
    "CoordinatorConfig",
    "DualVLLMCoordinator",
    "GenerationOutput",
    "ServerGone",
    "Step",
]
