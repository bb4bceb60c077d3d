# SPDX-License-Identifier: Apache-2.0
"""Sampling from between two models that two vLLM servers serve; see README.md."""

from dual_vllm.coordinator import (
    CoordinatorConfig,
    DualVLLMCoordinator,
    GenerationOutput,
    Step,
)
from dual_vllm.server import ServerError, ServerUnavailable

__all__ = [
    "CoordinatorConfig",
    "DualVLLMCoordinator",
    "GenerationOutput",
    "ServerError",
    "ServerUnavailable",
    "Step",
]
