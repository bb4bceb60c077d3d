# SPDX-License-Identifier: Apache-2.0
"""Engines that schedule a step before the last one has ended (reaches into private parts).

On a CPU vLLM switches that off. The V2 model runner does it there all the same.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from depth_routing import model_runner

from vllm.platforms.cpu import CpuPlatform


@pytest.fixture
def ahead(engine, runner):
    """As the `engine` fixture, with asynchronous scheduling."""
    if runner == "v1":
        pytest.skip("V1 needs a GPU for this")
    check = CpuPlatform.check_and_update_config

    def kept(vllm_config) -> None:
        scheduler_config = vllm_config.scheduler_config
        asked = scheduler_config.async_scheduling
        check(vllm_config)
        scheduler_config.async_scheduling = asked

    def start(family: str, **options):
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
