# SPDX-License-Identifier: Apache-2.0
"""One chat interface to a model that runs in this process, with vLLM or Hugging Face
transformers, or behind an OpenAI-compatible server.

All three get the same prompt: the model's own chat template, or else the one given.
A conversation that ends with the assistant's message is continued, not answered.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, Self

from common import ClientError

from ace.chat import Completion, Conversation, Sampling
from ace.local import VLLM, Transformers
from ace.server import Server

Provider = Literal["vllm", "openai", "transformers"]

ROOT = Path(__file__).resolve().parents[3]
REFERENCE_MODEL = ROOT / "examples" / "reference_model" / "model"
TEMPLATE = Path(__file__).with_name("chat_template.jinja")


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
            self._backend = Server(
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
            self._backend = VLLM(model, template, dtype, engine or {})
        elif provider == "transformers":
            self._backend = Transformers(model, template, dtype, batch_size)
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
        return self._backend.llm if isinstance(self._backend, VLLM) else None

    @property
    def retries(self) -> int:
        """Requests that had to be repeated."""
        return self._backend.retries if isinstance(self._backend, Server) else 0

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


def _without_system(conversation: Conversation) -> Conversation:
    """With the system's words at the head of the user's."""
    if [message["role"] for message in conversation[:2]] != ["system", "user"]:
        return conversation
    system, user, *others = conversation
    content = f"{system['content']}\n\n{user['content']}"
    return [{"role": "user", "content": content}, *others]
