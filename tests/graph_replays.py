# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs of draft passes, without a GPU (reaches into the engine's private parts).

A graph does again what was done when it was captured, with the very tensors of then. So
does what stands for one here: the captured call is made again, arguments and all. A pass
is right only if everything that differs from the captured one lies in buffers that both
read. Upstream's manager captures and dispatches, but for the two calls to CUDA.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

from depth_routing import model_runner


@contextmanager
def replaying(llm, largest: int) -> Iterator[Counter[int]]:
    """Has an engine that drafts replay its draft passes.

    Args:
        largest: The most rows that a graph is captured for.

    Yields:
        How often the graph of how many rows was replayed.
    """
    from vllm.config.compilation import CUDAGraphMode
    from vllm.platforms import current_platform
    from vllm.v1.worker.depth import draft_pass as module

    runner = model_runner(llm)
    draft_pass = runner.depth_router.first_layers
    replayed: Counter[int] = Counter()

    class Graphs(module.CudaGraphManager):
        def capture(self, create_forward_fn, progress_bar_desc):
            for graph in self._capture_descs[CUDAGraphMode.FULL]:
                create_forward_fn(graph, warmup=True)(CUDAGraphMode.NONE)
                self.graphs[graph] = create_forward_fn(graph, warmup=False)
                self.graphs[graph](CUDAGraphMode.NONE)
            self._graphs_captured = True

        def run_fullgraph(self, desc):
            replayed[desc.num_tokens] += 1
            self.graphs[desc](CUDAGraphMode.NONE)

    compilation = draft_pass.vllm_config.compilation_config
    with ExitStack() as stack:
        for name, value in {
            "cudagraph_mode": CUDAGraphMode.FULL_AND_PIECEWISE,
            "max_cudagraph_capture_size": largest,
        }.items():
            stack.enter_context(patch.object(compilation, name, value))
        stack.enter_context(patch.object(module, "CudaGraphManager", Graphs))
        stack.enter_context(patch.object(type(current_platform), "_global_graph_pool", (0, 0)))
        if hasattr(runner, "speculator"):  # V2
            runner.speculator.capture()
        else:
            draft_pass.capture()
    with ExitStack() as stack:
        stack.callback(draft_pass.attention.clear)
        stack.callback(setattr, draft_pass, "outputs", [])
        stack.callback(setattr, draft_pass, "graphs", None)
        for group in [group for groups in draft_pass.attn_groups for group in groups]:
            stack.enter_context(_own_buffers(draft_pass, group))
        yield replayed


@contextmanager
def _own_buffers(draft_pass, group) -> Iterator[None]:
    """Has an attention backend keep in buffers of its own what it computes from lengths,
    as those do that take part in graphs."""
    builder = group.get_metadata_builder()
    build = builder.build

    def building(*args, **kwargs):
        metadata = build(*args, **kwargs)
        for graph, attention in draft_pass.attention.items():
            if graph.num_tokens == metadata.num_actual_tokens:
                captured = attention.metadata[group.layer_names[0]]
                captured.scheduler_metadata = metadata.scheduler_metadata
        return metadata

    with patch.object(builder, "build", building):
        yield
