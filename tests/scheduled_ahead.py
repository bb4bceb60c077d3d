# SPDX-License-Identifier: Apache-2.0
"""Engines that schedule a step before the last one has ended (reaches into private parts).

On a CPU vLLM switches that off. Both model runners can do it there all the same.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from depth_routing import model_runner

from vllm.platforms.cpu import CpuPlatform


@pytest.fixture
def ahead(engine, runner):
    """As the `engine` fixture, with asynchronous scheduling."""
    check = CpuPlatform.check_and_update_config

    def kept(vllm_config) -> None:
        scheduler_config = vllm_config.scheduler_config
        asked = scheduler_config.async_scheduling
        check(vllm_config)
        scheduler_config.async_scheduling = asked

    def start(family: str, **options):
        if runner == "v1" and "speculative_config" in options:
            pytest.skip("V1 waits for the drafts that are accepted")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(CpuPlatform, "check_and_update_config", staticmethod(kept))
            llm = engine(family, async_scheduling=True, **options)
        core = llm.llm_engine.engine_core.engine_core
        assert core.async_scheduling and core.batch_queue is not None
        return llm

    return start


@contextmanager
def drafted_ahead(llm) -> Iterator[list[list[list[int]]]]:
    """Watches what is drafted: of each step, the drafts of each request."""
    early_exit = model_runner(llm).depth_router
    draft, drafted = early_exit.draft_ahead, []

    def watching(*args):
        tokens = draft(*args)
        drafted.append(tokens.tolist())
        return tokens

    early_exit.draft_ahead = watching
    try:
        yield drafted
    finally:
        del early_exit.draft_ahead


OURS = ("/v1/worker/depth/", "/layers/depth/", "/gpu/spec_decode/early_exit.py")
WAITS = ("cpu", "item", "tolist", "nonzero", "__bool__", "__int__", "__index__")
"""Methods of a tensor that wait for the GPU, if it is there."""


@contextmanager
def nothing_waits() -> Iterator[None]:
    """Fails where drafting or routing reads a tensor on the host, or makes one of what the
    host has by a copy that waits."""

    def watched(name: str, function):
        def call(*args, **kwargs):
            caller = sys._getframe(1).f_code
            if any(part in caller.co_filename for part in OURS):
                raise AssertionError(f"{caller.co_qualname} waits: {name}")
            return function(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in WAITS:
            patch.setattr(torch.Tensor, name, watched(name, getattr(torch.Tensor, name)))
        for name in ("tensor", "as_tensor"):
            patch.setattr(torch, name, watched(name, getattr(torch, name)))
        yield
