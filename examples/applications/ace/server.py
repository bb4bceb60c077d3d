# SPDX-License-Identifier: Apache-2.0
"""A model behind an OpenAI-compatible server."""

from typing import Any

from common import Client, ClientError, ServerGone, top_ids
from common.program import options_named

from ace.chat import (
    Completion,
    Conversation,
    Sampling,
    absolute,
    advice,
    is_continued,
)


class Server:
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
        served = absolute(found.root) if found.root else found.name
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
                error.message + advice(error.message),
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
