# SPDX-License-Identifier: Apache-2.0
"""Models in this process."""

from collections.abc import Sequence
from typing import Any

from common import ClientError
from safetensors import SafetensorError

from ace.chat import Completion, Sampling, identity, is_continued, refused


class VLLM:
    """`vllm.LLM`: the whole batch is under way at once."""

    def __init__(self, model: str, template: str, dtype: str, engine: dict[str, Any]):
        from vllm import LLM

        self.model = model
        try:
            self.llm = LLM(model=model, dtype=dtype, **engine)
        except (OSError, TypeError, ValueError, SafetensorError) as error:
            raise ClientError(f"vLLM cannot load {model!r}: {error}") from error
        own = getattr(self.llm.get_tokenizer(), "chat_template", None)
        self.template = None if own else template
        self.identity = identity(model, own or template)

    def complete(self, conversations, sampling, top):
        from vllm import SamplingParams
        from vllm.exceptions import VLLMValidationError

        engine = self.llm.llm_engine
        waiting: dict[str, int] = {}
        try:
            params = SamplingParams(
                max_tokens=sampling.max_tokens,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                seed=sampling.seed,
                stop=list(sampling.stop),
                logprobs=top or None,
            )
            for index, conversation in enumerate(conversations):
                (request,) = self.llm.enqueue_chat(
                    [conversation],
                    params,
                    use_tqdm=False,
                    chat_template=self.template,
                    add_generation_prompt=not is_continued(conversation),
                    continue_final_message=is_continued(conversation),
                )
                # Outputs have the number alone; within vLLM, more is added to it.
                waiting[request.partition("-")[0]] = index
            while waiting:
                for output in engine.step():
                    if output.finished:
                        index = waiting.pop(output.request_id)
                        yield index, self._completion(output)
        except (ValueError, VLLMValidationError) as error:
            # Too long, a setting that does not fit, or the chat template refuses.
            raise refused(self.model, error) from error
        finally:
            if waiting:
                engine.abort_request([*waiting])

    @staticmethod
    def _completion(output) -> Completion:
        (found,) = output.outputs
        top = found.logprobs and [
            {token: entry.logprob for token, entry in position.items()}
            for position in found.logprobs
        ]
        return Completion(
            found.text,
            found.finish_reason,
            [*output.prompt_token_ids],
            [*found.token_ids],
            top or None,
        )

    def close(self) -> None:
        engine_core = getattr(self.llm.llm_engine, "engine_core", None)
        if engine_core is not None:
            engine_core.shutdown()


class Transformers:
    """`generate` of Hugging Face, `batch_size` conversations at once."""

    def __init__(self, model: str, template: str, dtype: str, batch_size: int):
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

        self.model = model
        self.batch_size = batch_size
        known = dtype == "auto" or isinstance(getattr(torch, dtype, None), torch.dtype)
        if not known:
            raise ClientError(f"--dtype {dtype}: torch has no such type")
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
            self.network = AutoModelForCausalLM.from_pretrained(
                model, dtype=getattr(torch, dtype, dtype)
            )
        except (OSError, TypeError, ValueError, SafetensorError) as error:
            raise ClientError(f"transformers cannot load {model!r}: {error}") from error
        self.network.eval()
        if torch.cuda.is_available():
            self.network.to("cuda")
        if not self.tokenizer.chat_template:
            self.tokenizer.chat_template = template
        self.identity = identity(model, self.tokenizer.chat_template)
        ends = self.network.generation_config.eos_token_id
        if ends is None:
            ends = self.tokenizer.eos_token_id
        self.ends = [ends] if isinstance(ends, int) else list(ends or [])
        # Else it fills in what `complete` leaves out, such as a repetition penalty.
        self.network.generation_config = GenerationConfig()
        if self.tokenizer.pad_token_id is None:
            self.tokenizer.pad_token_id = self.ends[0] if self.ends else 0

    def complete(self, conversations, sampling, top):
        from jinja2 import TemplateError

        try:
            prompts = [
                self.tokenizer.apply_chat_template(
                    conversation,
                    add_generation_prompt=not is_continued(conversation),
                    continue_final_message=is_continued(conversation),
                    return_dict=False,
                )
                for conversation in conversations
            ]
        except (TemplateError, ValueError) as error:
            raise refused(f"{self.model}: the chat template", error) from error
        config = self.network.config.get_text_config()
        context = getattr(config, "max_position_embeddings", None)  # None: no bound
        longest = max(map(len, prompts), default=0)
        if context is not None and longest > context - sampling.max_tokens:
            raise ClientError(
                f"{self.model}: a prompt has {longest} tokens; with "
                f"{sampling.max_tokens} to generate, at most "
                f"{context - sampling.max_tokens} fit its context"
            )
        for begin in range(0, len(prompts), self.batch_size):
            batch = prompts[begin : begin + self.batch_size]
            for offset, found in enumerate(self._generate(batch, sampling, top)):
                yield begin + offset, found

    def _generate(
        self, prompts: list[list[int]], sampling: Sampling, top: int
    ) -> list[Completion]:
        import torch
        from transformers import GenerationConfig, StoppingCriteriaList

        options: dict[str, Any] = {"do_sample": False}
        if sampling.temperature:
            options = {
                "do_sample": True,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k,
            }
            if sampling.seed is not None:
                torch.manual_seed(sampling.seed)
        config = GenerationConfig(
            max_new_tokens=sampling.max_tokens,
            eos_token_id=self.ends or None,
            pad_token_id=self.tokenizer.pad_token_id,
            return_dict_in_generate=True,
            output_logits=top > 0,
            **options,
        )
        inputs = self.tokenizer.pad({"input_ids": prompts}, return_tensors="pt")
        inputs = inputs.to(self.network.device)
        width = inputs["input_ids"].shape[1]
        last = max(map(len, sampling.stop), default=0) + 8  # tokens without a character

        def has_stopped(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            texts = self.tokenizer.batch_decode(
                ids[:, width:][:, -last:], skip_special_tokens=True
            )
            stopped = [_cut(text, sampling.stop) != text for text in texts]
            return torch.tensor(stopped, device=ids.device)

        # Its own `stop_strings` may begin in the prompt, which vLLM's may not.
        criteria = StoppingCriteriaList([has_stopped] if sampling.stop else [])
        with torch.inference_mode():
            out = self.network.generate(
                **inputs, generation_config=config, stopping_criteria=criteria
            )
        tables = None
        if top:
            logits = torch.stack(out.logits, dim=1).float()  # [batch, tokens, vocab]
            tables = logits.log_softmax(-1).topk(top)
        completions = []
        for row, prompt in enumerate(prompts):
            ids = out.sequences[row, width:].tolist()
            end = next((n for n, i in enumerate(ids) if i in self.ends), None)
            if end is not None:
                ids = ids[: end + 1]
            whole = self.tokenizer.decode(ids, skip_special_tokens=True)
            text, length = _cut(whole, sampling.stop), len(ids)
            if text != whole:  # the others of the batch went on
                length = self._shortest(ids, whole, text, sampling.stop)
            ended = end is not None or text != whole
            likeliest = tables and [
                dict(
                    zip(
                        tables.indices[row, n].tolist(),
                        tables.values[row, n].tolist(),
                        strict=True,
                    )
                )
                for n in range(length)
            ]
            completions.append(
                Completion(
                    text,
                    "stop" if ended else "length",
                    prompt,
                    ids[:length],
                    likeliest or None,
                )
            )
        return completions

    def _shortest(self, ids: list[int], whole: str, text: str, stop) -> int:
        """Tokens until a stop string is complete."""
        for length in range(1, len(ids)):
            part = self.tokenizer.decode(ids[:length], skip_special_tokens=True)
            if _cut(part, stop) != part:
                return length
        return len(ids)

    def close(self) -> None:
        del self.network


def _cut(text: str, stop: Sequence[str]) -> str:
    """The text before the first stop string."""
    places = [place for s in stop if (place := text.find(s)) >= 0]
    return text[: min(places)] if places else text
