# SPDX-License-Identifier: Apache-2.0
"""Model `utio` for lm-eval: its `vllm` model, scoring the tokens of the answers only.

lm-eval's own `vllm` model asks for the log-probabilities of whole prompts, which vLLM
can not read from its prefix cache, once for each answer. This one asks for those of the
answers (`LLM.score_continuations`), so a context is prefilled once for all its answers
and few-shot examples once for all the questions that begin with them. Tokenization,
truncation, the windows of rolling log-likelihoods and generation are lm-eval's.
"""

from lm_eval.api.registry import register_model
from lm_eval.models.vllm_causallms import VLLM, eval_logger


@register_model("utio")
class UTIO(VLLM):
    """Takes the `--model_args` of lm-eval's `vllm` model, but `data_parallel_size`.

    Raises:
        ValueError: `data_parallel_size` is greater than 1: lm-eval starts an engine for
            each call then.
    """

    def __init__(self, pretrained: str, **kwargs):
        if int(kwargs.get("data_parallel_size", 1)) > 1:
            raise ValueError("data_parallel_size must be 1 for model `utio`")
        super().__init__(pretrained, **kwargs)

    def _loglikelihood_tokens(
        self, requests, disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Sum of log-probabilities in nats, and whether greedy decoding would choose
        them, of each request's continuation.

        Args:
            requests: `(cache_key, context_ids, continuation_ids)` triples.
        """
        answers = [(0.0, True)] * len(requests)  # of a continuation without a token
        groups: dict[tuple[int, ...], list[int]] = {}
        continuations = []
        for index, (_, context, continuation) in enumerate(requests):
            context, continuation = self._truncate(context, continuation)
            continuations.append(continuation)
            if continuation:
                groups.setdefault(tuple(context), []).append(index)
        # Contexts that begin alike come one after the other, so that what they share
        # is still in the cache.
        contexts = sorted(groups)
        scores = self.model.score_continuations(
            [(ids, [continuations[i] for i in groups[ids]]) for ids in contexts],
            lora_request=self.lora_request,
            use_tqdm=not disable_tqdm,
        )
        for ids, group in zip(contexts, scores, strict=True):
            for index, score in zip(groups[ids], group, strict=True):
                answers[index] = (score.logprob_sum, score.is_greedy)
        for (cache_key, _, _), answer in zip(requests, answers, strict=True):
            if cache_key is not None:
                self.cache_hook.add_partial("loglikelihood", cache_key, answer)
        return answers

    def _truncate(
        self, context: list[int], continuation: list[int]
    ) -> tuple[list[int], list[int]]:
        """Cuts what is too long from the left, as lm-eval's model does; one token is
        left as context."""
        longest = self.max_length - 1  # vLLM wants room for one more token
        excess = len(context) + len(continuation) - longest
        if excess <= 0:
            return context, continuation
        eval_logger.warning("cutting %d tokens of a prompt from the left", excess)
        kept = (context + continuation)[excess:]
        begin = max(len(context) - excess, 1)
        return kept[:begin], kept[begin:]
