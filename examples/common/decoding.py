# SPDX-License-Identifier: Apache-2.0
"""Teacher forcing in decoding: a request generates the tokens that it is told.

For programs that run the engine themselves: `LLM(..., logits_processors=[ForcedTokens])`.
"""

import torch
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor


class ForcedTokens(AdapterLogitsProcessor):
    """Makes a request generate the tokens in its `extra_args["forced"]`."""

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
