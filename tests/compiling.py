# SPDX-License-Identifier: Apache-2.0
"""Starting engines that compile, in one process with others."""

from contextlib import contextmanager

import pytest


@contextmanager
def compiling(folder, backend: str):
    """The environment of an engine that compiles: `eager` only traces."""
    from vllm.envs import disable_envs_cache

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CACHE_ROOT", str(folder))
        if backend == "eager":
            patch.setenv("VLLM_CPU_CI_ENV", "1")
        disable_envs_cache()  # an engine that was started before has filled it
        yield
    disable_envs_cache()
