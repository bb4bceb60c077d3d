# SPDX-License-Identifier: Apache-2.0
"""Batches as CUDA graphs take them, without a GPU (reaches into the engine's private
parts).

A graph runs a fixed number of rows: what is dispatched to one is padded. Here each step
that could replay a graph is padded as for one, and then runs without.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from unittest.mock import patch

from depth_routing import model_runner

SIZE = 16
"""Rows of the graphs are multiples of it."""


@dataclass
class Dispatched:
    """What was dispatched, step by step."""

    to_graphs: list[bool] = field(default_factory=list)
    """Whether the step could replay a graph."""
    planned: list[bool] = field(default_factory=list)
    """Whether the layer loop ran the step by a plan."""


@contextmanager
def padding(llm) -> Iterator[Dispatched]:
    """Pads steps as CUDA graphs would."""
    runner = model_runner(llm)
    found = Dispatched()
    modules = [m for m in runner.model.modules() if getattr(m, "depth_loop", None)]
    loop = modules[0].depth_loop
    run = loop.run

    def padded(descriptor, to_graph: bool):
        found.to_graphs.append(to_graph)
        found.planned.append(False)
        rows = -(-descriptor.num_tokens // SIZE) * SIZE
        return replace(descriptor, num_tokens=rows) if to_graph else descriptor

    def running(step, *args):
        from vllm.model_executor.layers.depth.early_exit import DraftStep

        if not isinstance(step, DraftStep):  # its pass is none of the scheduler's steps
            found.planned[-1] = True
        return run(step, *args)

    with patch.object(loop, "run", running):
        if type(runner).__module__.startswith("vllm.v1.worker.cpu."):
            import vllm.v1.worker.gpu.model_runner as module

            dispatch = module.dispatch_cg_and_sync_dp

            def of_v2(*args, need_eager=False, **kwargs):
                descriptor, sync = dispatch(*args, need_eager=need_eager, **kwargs)
                return padded(descriptor, not need_eager), sync

            with patch.object(module, "dispatch_cg_and_sync_dp", of_v2):
                yield found
        else:
            dispatcher = runner.cudagraph_dispatcher
            dispatch = dispatcher.dispatch

            def of_v1(*args, valid_modes=None, **kwargs):
                mode, descriptor = dispatch(*args, valid_modes=valid_modes, **kwargs)
                return mode, padded(descriptor, valid_modes is None)

            with patch.object(dispatcher, "dispatch", of_v1):
                yield found
