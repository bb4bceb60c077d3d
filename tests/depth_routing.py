# SPDX-License-Identifier: Apache-2.0
"""Short words for the depth tests: plant depths, serve requests, check their logits.

The engine runs inside this process, so that the tests and `Planted`, which the
engine is told to use as its policy, share state.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count

import numpy as np
import torch
from depth_oracle import DepthOracle
from scoring import params

NUM_LAYERS = 6  # of the `deep_` models
CUTOFFS = (2, 4, NUM_LAYERS)
TOLERANCE = 1e-4
"""Most that a float32 logit may differ from the oracle's. Without routing, vLLM and
the oracle differ by up to 4.3e-5 here, as two orders of evaluation on Transformers
alone do (3.5e-5). A wrong depth costs 0.05 to 10."""
POISON = 1e30
"""What unwritten slots of the KV cache are filled with. Attention on the CPU also
multiplies what lies behind a sequence's end by probability zero, so with NaN a run
without routing fails as well; with this number it does not."""

CACHES = {"deep_llama": {}, "deep_gemma3": dict(prefix_cache_retention_interval=32)}
"""Families with one group of KV caches and with three, two of which have a window; and
options by which a prompt's blocks of these are cached like others."""

Plan = Callable[[int, int], int]  # (number of the request, decode step) -> depth


def random_plan(seed: int, cutoffs: Sequence[int] = CUTOFFS) -> Plan:
    """A depth for each request and step, the same for the same arguments."""
    return lambda request, step: int(
        np.random.default_rng((seed, request, step)).choice(cutoffs)
    )


def callers_id(req_id: str) -> str:
    """The engine appends eight random characters to the id that it is given."""
    return req_id.rpartition("-")[0]


class Planted:
    """A policy that gives each token the depth that the test planted for it."""

    plan: Callable[[str, int], int]  # (request id, decode step) -> depth
    given: dict[str, list[int]]  # by request id
    scores: dict[str, list[float]]  # that came with them

    def __init__(self, config):
        self.cutoffs = list(config.cutoffs)

    @classmethod
    def expect(cls, plan: Callable[[str, int], int]) -> None:
        cls.plan = staticmethod(plan)
        cls.given, cls.scores = defaultdict(list), defaultdict(list)

    def assign(self, scores: torch.Tensor, req_ids: Sequence[str]):
        depths = []
        for score, req_id in zip(scores.tolist(), req_ids, strict=True):
            request_id = callers_id(req_id)
            depths.append(self.plan(request_id, len(self.given[request_id])))
            self.given[request_id].append(depths[-1])
            self.scores[request_id].append(score)
        order = np.argsort(depths, kind="stable")[::-1].copy()
        return torch.from_numpy(order), [depths.count(c) for c in self.cutoffs]


def routing(**options) -> dict:
    """Engine options: every decode token gets its planted depth."""
    return dict(
        enable_utio=True,
        utio_bucket_cutoffs=CUTOFFS[:-1],
        utio_min_batch_size=1,
        utio_gate=False,
        utio_policy=f"{Planted.__module__}.{Planted.__qualname__}",
    ) | logits_options(**options)


def logits_options(**options) -> dict:
    """Engine options: requests may ask for all raw logits; prefill in chunks."""
    return (
        dict(
            logprobs_mode="raw_logits",
            max_logprobs=-1,
            max_num_batched_tokens=64,
            block_size=32,  # the smallest that attention on a CPU takes
        )
        | options
    )


@dataclass
class Request:
    """What is asked for and, once served, what came of it."""

    prompt: list[int]
    max_tokens: int = 8
    arrival: int = 0  # step before which it is added
    options: dict = field(default_factory=dict)  # of its SamplingParams
    # Once served:
    tokens: list[int] = field(default_factory=list)
    logits: np.ndarray | None = None  # [tokens, vocabulary]
    depths: list[int] = field(default_factory=list)  # planted, of its decode steps
    scores: list[float] = field(default_factory=list)  # of the same steps
    # Numbers of generated tokens at which it was preempted.
    preempted: set[int] = field(default_factory=set)
    output: object = None  # the RequestOutput

    def take(self, completion) -> None:
        """Takes tokens and logits over from a CompletionOutput."""
        self.tokens = list(completion.token_ids)
        flat = completion.logprobs
        # The chosen token comes first and again in its place among all.
        shape = (len(self.tokens), -1)
        ids = np.array(flat.token_ids).reshape(shape)
        self.logits = np.full((len(ids), ids.shape[1] - 1), np.nan)
        values = np.array(flat.logprobs).reshape(shape)
        np.put_along_axis(self.logits, ids, values, axis=1)


_numbers = count()


def serve(
    llm,
    requests: Sequence[Request],
    plan: Plan = lambda request, step: NUM_LAYERS,
    *,
    interrupt_at: int | None = None,
    others: dict | None = None,
) -> Sequence[Request]:
    """Steps the engine until all requests are done and fills them in.

    Args:
        plan: the depths of their decode tokens.
        interrupt_at: step before which all running requests are preempted.
        others: takes the outputs of requests that were there before, by their id.

    Returns:
        `requests`.
    """
    from vllm import TokensPrompt
    from vllm.sampling_params import RequestOutputKind

    engine = llm.llm_engine
    scheduler = engine.engine_core.engine_core.scheduler
    assert others is not None or not engine.has_unfinished_requests()
    by_id = {f"d{next(_numbers)}": request for request in requests}
    index = {request_id: n for n, request_id in enumerate(by_id)}
    # Sequence 2 of n of request "d5" is called "2_d5".
    Planted.expect(lambda name, step: plan(index[name.rpartition("_")[2]], step))
    waiting = sorted(by_id.items(), key=lambda item: item[1].arrival)
    for step in range(10_000):
        while waiting and waiting[0][1].arrival <= step:
            request_id, request = waiting.pop(0)
            sampling = params(
                request.max_tokens,
                **dict(logprobs=-1, flat_logprobs=True, detokenize=False)
                | request.options,
            )
            sampling.output_kind = RequestOutputKind.FINAL_ONLY
            prompt = TokensPrompt(prompt_token_ids=request.prompt)
            engine.add_request(request_id, prompt, sampling)
        if not waiting and not engine.has_unfinished_requests():
            break
        if step == interrupt_at:
            assert engine.reset_prefix_cache(reset_running_requests=True)
            _note_preempted(scheduler, by_id)
        for output in engine.step():
            if output.request_id in by_id:
                by_id[output.request_id].output = output
            elif output.finished:
                others[output.request_id] = output
        _note_preempted(scheduler, by_id)
    for request_id, request in by_id.items():
        request.take(request.output.outputs[0])
        assert len(request.tokens) == request.max_tokens, "cut short"
        request.depths = Planted.given[request_id]
        request.scores = Planted.scores[request_id]
    return requests


def _note_preempted(scheduler, by_id: dict[str, Request]) -> None:
    for live in scheduler.requests.values():
        if live.status.name == "PREEMPTED":
            request = by_id[callers_id(live.request_id)]
            request.preempted.add(live.num_output_tokens)


def expected_logits(
    oracle: DepthOracle, request: Request, depths: Sequence[int]
) -> np.ndarray:
    """What the oracle says of a served request, `[tokens, vocabulary]`.

    A request that was preempted after k generated tokens goes on from a prefill of
    its prompt and those k tokens, through all layers.

    Args:
        depths: of its decode steps, in order; further ones are not looked at.
    """
    cuts = sorted(request.preempted - {0, len(request.tokens)})
    rows, depths = [], list(depths)
    for start, end in zip([0, *cuts], [*cuts, len(request.tokens)]):
        steps = end - start - 1
        assert len(depths) >= steps, "fewer decode steps were routed than there were"
        prompt = request.prompt + request.tokens[:start]
        rows.append(oracle.logits(prompt, request.tokens[start:end], depths[:steps]))
        depths = depths[steps:]
    return np.concatenate(rows)


def assert_logits(
    oracle: DepthOracle, requests: Iterable[Request], depth: int | None = None
) -> None:
    """Asserts every logit of every generated token.

    Args:
        depth: of all decode steps of all requests; by default those planted.
    """
    for number, request in enumerate(requests):
        own = request.depths
        if depth is not None:
            own = [depth] * len(request.tokens)
        difference = abs(request.logits - expected_logits(oracle, request, own))
        worst = difference.max(axis=1)
        # Not `worst > TOLERANCE`: that lets NaN pass.
        wrong = np.flatnonzero(~(worst <= TOLERANCE))
        assert not len(wrong), (
            f"request {number}: prompt of {len(request.prompt)}, planted {own}, "
            f"preempted at {request.preempted}, generated tokens {wrong} are off by "
            f"{worst[wrong]}"
        )


def model_runner(llm):
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner


def poison_cache(llm) -> None:
    """Overwrites the whole KV cache of an idle engine and forgets its prefixes."""
    assert llm.reset_prefix_cache()
    caches = model_runner(llm).kv_caches
    assert len(caches) == NUM_LAYERS
    for cache in caches:
        cache.fill_(POISON)


@contextmanager
def no_empty_batches() -> Iterator[None]:
    """No module is given zero rows: CUDA kernels cannot be launched for them."""
    from torch.nn.modules.module import register_module_forward_pre_hook

    found = Counter()

    def look(module, inputs):
        tensors = [x for x in inputs if isinstance(x, torch.Tensor) and x.dim()]
        found["all"] += bool(tensors)
        if any(len(tensor) == 0 for tensor in tensors):
            found[type(module).__name__] += 1

    with register_module_forward_pre_hook(look):
        yield
    assert found.pop("all", 0) > 0
    assert not found


@contextmanager
def mlp_rows(llm) -> Iterator[list[int]]:
    """Counts the rows that the MLP of each layer of a Llama is given."""
    rows = [0] * NUM_LAYERS

    def counting(layer: int):
        def hook(module, args):
            rows[layer] += args[0].shape[0]

        return hook

    layers = model_runner(llm).model.model.layers
    hooks = [
        layer.mlp.register_forward_pre_hook(counting(index))
        for index, layer in enumerate(layers)
    ]
    try:
        yield rows
    finally:
        for hook in hooks:
            hook.remove()


def counters(llm) -> Counter:
    """Values of the counters by name and the label that is their own."""
    found = Counter()
    for metric in llm.get_metrics():
        if metric.name.startswith("vllm:utio"):
            own = metric.labels.get("depth") or metric.labels.get("reason")
            found[metric.name.removeprefix("vllm:utio_"), own] += metric.value
    return found
