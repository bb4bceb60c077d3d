# SPDX-License-Identifier: Apache-2.0
"""Timed decoding, and teacher forcing in it, for programs that run the engine themselves."""

import time
from collections.abc import Iterable

import torch
from vllm import LLM, CompletionOutput, SamplingParams, TokensPrompt
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor


class ForcedTokens(AdapterLogitsProcessor):
    """Makes a request generate the tokens in its `extra_args["forced"]`.

    To be given as `LLM(..., logits_processors=[ForcedTokens])`.
    """

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params):
        forced = (params.extra_args or {}).get("forced")
        if forced is None:
            return None

        def force(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            token = forced[len(output_ids)]
            logits.fill_(-torch.inf)
            logits[token] = 0.0
            return logits

        return force


def decode_together(
    llm: LLM, requests: Iterable[tuple[list[int], SamplingParams]]
) -> tuple[list[CompletionOutput], float]:
    """Runs prompts at once, each with its parameters; request ids are their numbers.

    Returns:
        the completions, and the seconds since all requests had a token.
    """
    engine = llm.llm_engine
    count = 0
    for ids, params in requests:
        engine.add_request(f"{count}", TokensPrompt(prompt_token_ids=ids), params)
        count += 1
    done, begun, started = {}, set(), 0.0
    while engine.has_unfinished_requests():
        for output in engine.step():
            begun.add(output.request_id)
            if output.finished:
                done[int(output.request_id)] = output.outputs[0]
        if not started and len(begun) == count:
            started = time.perf_counter()
    return [done[n] for n in range(count)], time.perf_counter() - started
