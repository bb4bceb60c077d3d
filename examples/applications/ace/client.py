# SPDX-License-Identifier: Apache-2.0
"""One chat interface to a model that runs in this process, with vLLM or Hugging Face
transformers, or behind an OpenAI-compatible server.

All three get the same prompt: the model's own chat template, or else the one given.
A conversation that ends with the assistant's message is continued, not answered.
"""

from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, Self

from common import Client, ClientError, ServerGone, top_ids
from common.program import options_named
from pydantic import BaseModel, ConfigDict, Field
from safetensors import SafetensorError

Provider = Literal["vllm", "openai", "transformers"]
Conversation = list[dict[str, str]]
"""Messages with `role` and `content`."""

ROOT = Path(__file__).resolve().parents[3]
REFERENCE_MODEL = ROOT / "examples" / "reference_model" / "model"
TEMPLATE = Path(__file__).with_name("chat_template.jinja")


class Sampling(BaseModel):
    """How tokens are drawn. The model's own `generation_config.json` does not count,
    except for where a text ends."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_tokens: int = Field(128, ge=1)
    temperature: float = Field(0.0, ge=0, le=2)  # 0: greedy
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)  # 0: all
    seed: int | None = None
    stop: tuple[str, ...] = ()  # a text ends before the first of these


class Completion(NamedTuple):
    """What the model said. The last three are None where a server does not tell."""

    text: str
    finish_reason: str  # stop or length
    prompt_token_ids: list[int] | None
    token_ids: list[int] | None
    top: list[dict[int, float]] | None
    """For each token, the likeliest ids and their log-probabilities in nats, of the
    whole distribution at temperature 1."""


class _Backend(Protocol):
    model: str
    identity: dict[str, str | None]

    def complete(
        self, conversations: Sequence[Conversation], sampling: Sampling, top: int
    ) -> Iterator[tuple[int, Completion]]: ...

    def close(self) -> None: ...


class LLMClient:
    """A chat model.

    ```python
    with LLMClient(provider="vllm") as client:
        [answer] = client.chat([[{"role": "user", "content": "Hello"}]], Sampling())
    ```

    Args:
        provider: "vllm" and "transformers" load the model into this process; "openai"
            asks the server at `base_url`.
        model: a folder or hub name; the shipped reference model if None. With
            "openai", the served name; the server's only model if None.
        chat_template: a Jinja file for models that have no template of their own.
            (A server has its own: `vllm serve --chat-template`.)
        system_role: give instructions in the system's turn; if not, at the head of
            the user's, for models whose chat template has no system role.
        dtype: of the weights in this process.
        engine: more options of `vllm.LLM`, such as `speculative_config`.
        batch_size: conversations that transformers generates at once, padded on the
            left.
        base_url, api_key, timeout, patience, concurrency: of the server; seconds for
            one answer, seconds to go on trying while it fails, requests under way.

    Raises:
        ClientError: no such model, or it has no chat template and none is given.
        ServerGone: nothing answered for `patience` seconds.
    """

    def __init__(
        self,
        provider: Provider = "vllm",
        model: str | None = None,
        *,
        chat_template: Path = TEMPLATE,
        system_role: bool = True,
        dtype: str = "float32",
        engine: dict[str, Any] | None = None,
        batch_size: int = 1,
        base_url: str = "http://localhost:8000/v1",
        api_key: str = "EMPTY",
        timeout: float = 600,
        patience: float = 600,
        concurrency: int = 64,
    ):
        self.provider = provider
        self.system_role = system_role
        self._backend: _Backend
        if provider == "openai":
            self._backend = _Server(
                base_url,
                model,
                api_key=api_key,
                timeout=timeout,
                patience=patience,
                concurrency=concurrency,
            )
            return
        model = model or str(REFERENCE_MODEL)
        try:
            template = chat_template.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ClientError(f"--chat-template: {chat_template}: {error}") from error
        if provider == "vllm":
            self._backend = _VLLM(model, template, dtype, engine or {})
        elif provider == "transformers":
            self._backend = _Transformers(model, template, dtype, batch_size)
        else:
            raise ClientError(f"no such provider: {provider}")

    @property
    def model(self) -> str:
        """Folder, hub name or served name."""
        return self._backend.model

    @property
    def identity(self) -> dict[str, str | None]:
        """What is the same for clients that ask the same model in the same way: the
        folder or hub name of `model`, or the served name where a server does not tell
        it, and the hash of the `chat_template`, None where a server has it."""
        return self._backend.identity

    @property
    def engine(self) -> Any:
        """The `vllm.LLM` of the provider "vllm"."""
        return self._backend.llm if isinstance(self._backend, _VLLM) else None

    @property
    def retries(self) -> int:
        """Requests that had to be repeated."""
        return self._backend.retries if isinstance(self._backend, _Server) else 0

    def complete(
        self,
        conversations: Sequence[Conversation],
        sampling: Sampling,
        *,
        top: int = 0,
    ) -> Iterator[tuple[int, Completion]]:
        """All conversations in one batch; each one's index and completion as soon as
        it is finished. What is left is given up when the iterator is closed.

        Args:
            top: how many log-probabilities to bring for each token.

        Raises:
            ClientError: refused; says why.
            ServerGone: no good answer for `patience` seconds.
        """
        if not self.system_role:
            conversations = [*map(_without_system, conversations)]
        return self._backend.complete(conversations, sampling, top)

    def chat(
        self,
        conversations: Sequence[Conversation],
        sampling: Sampling,
        *,
        top: int = 0,
    ) -> list[Completion]:
        """As `complete`, all together and in order."""
        found = dict(self.complete(conversations, sampling, top=top))
        return [found[index] for index in range(len(conversations))]

    def close(self) -> None:
        self._backend.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        self.close()


def is_continued(conversation: Conversation) -> bool:
    return conversation[-1]["role"] == "assistant"


def _without_system(conversation: Conversation) -> Conversation:
    """With the system's words at the head of the user's."""
    if [message["role"] for message in conversation[:2]] != ["system", "user"]:
        return conversation
    system, user, *others = conversation
    content = f"{system['content']}\n\n{user['content']}"
    return [{"role": "user", "content": content}, *others]


def _identity(model: str, template: Any) -> dict[str, str | None]:
    """Of `LLMClient.identity`. A template is a text, or for some models several."""
    digest = sha256(str(template).encode()).hexdigest()
    return {"model": _absolute(model), "chat_template": digest}


def _absolute(model: str) -> str:
    return str(Path(model).resolve()) if Path(model).is_dir() else model


def _refused(asked: str, reason: Any) -> ClientError:
    return ClientError(f"{asked}: {reason}{_advice(str(reason))}")


def _advice(reason: str) -> str:
    """Names the option that helps where a chat template does not take a role."""
    if "continue_final_message" in reason:
        return " (--no-prefill gives no beginnings of answers)"
    if "role" in reason.lower():
        return " (--no-system-role puts the instructions into the user's turn)"
    return ""


class _VLLM:
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
        self.identity = _identity(model, own or template)

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
            raise _refused(self.model, error) from error
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


class _Transformers:
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
        self.identity = _identity(model, self.tokenizer.chat_template)
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
            raise _refused(f"{self.model}: the chat template", error) from error
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


class _Server:
    """Chat completions over HTTP. The options are those of `common.Client`."""

    def __init__(self, base_url: str, model: str | None, **options: Any):
        with options_named():
            self._client = Client(base_url, model, **options)
        try:
            found = self._client.connect()
        except BaseException:
            self.close()
            raise
        self.url, self.model = self._client.url, found.name
        self.is_vllm = found.owned_by == "vllm"
        # The folder or hub name, which vLLM's servers tell; of others the served name.
        served = _absolute(found.root) if found.root else found.name
        self.identity = {"model": served, "chat_template": None}

    @property
    def retries(self) -> int:
        return self._client.retries

    def complete(self, conversations, sampling, top):
        if not self.is_vllm and any(map(is_continued, conversations)):
            raise ClientError(
                f"{self.url} is no vLLM server, so it cannot be given the beginning of "
                "an answer: --no-prefill"
            )
        if not self.is_vllm and sampling.top_k:
            raise ClientError(f"{self.url} is no vLLM server and knows no top_k")
        yield from self._client.as_completed(
            self._chat(conversation, sampling, top) for conversation in conversations
        )

    async def _chat(
        self, conversation: Conversation, sampling: Sampling, top: int
    ) -> Completion:
        fields = self._fields(conversation, sampling, top)
        try:
            answer = await self._client.aio.chat(conversation, **fields)
        except ServerGone:
            raise
        except ClientError as error:
            raise ClientError(
                error.message + _advice(error.message),
                status=error.status,
                param=error.param,
                url=error.url,
            ) from error
        (choice,) = answer.choices
        if top and choice.top is None:
            raise ClientError(f"{self.url} gives no log-probabilities")
        return Completion(
            choice.text,
            choice.finish_reason,
            choice.prompt_token_ids,
            choice.token_ids,
            [*map(top_ids, choice.top)] if top and self.is_vllm else None,
        )

    def _fields(
        self, conversation: Conversation, sampling: Sampling, top: int
    ) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
        }
        if sampling.seed is not None:
            fields["seed"] = sampling.seed
        if sampling.stop:
            fields["stop"] = list(sampling.stop)
        if top:
            fields |= {"logprobs": True, "top_logprobs": top}
        if self.is_vllm:
            continued = is_continued(conversation)
            fields |= {
                "top_k": sampling.top_k,
                "min_p": 0.0,
                "repetition_penalty": 1.0,
                "continue_final_message": continued,
                "add_generation_prompt": not continued,
                "return_token_ids": True,
                "return_tokens_as_token_ids": bool(top),
            }
        return fields

    def close(self) -> None:
        self._client.close()
