# SPDX-License-Identifier: Apache-2.0
"""What all ways of asking a model have in common."""

from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from common import ClientError
from pydantic import BaseModel, ConfigDict, Field

Conversation = list[dict[str, str]]
"""Messages with `role` and `content`."""


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


def is_continued(conversation: Conversation) -> bool:
    return conversation[-1]["role"] == "assistant"


def identity(model: str, template: Any) -> dict[str, str | None]:
    """Of `LLMClient.identity`. A template is a text, or for some models several."""
    digest = sha256(str(template).encode()).hexdigest()
    return {"model": absolute(model), "chat_template": digest}


def absolute(model: str) -> str:
    return str(Path(model).resolve()) if Path(model).is_dir() else model


def refused(asked: str, reason: Any) -> ClientError:
    return ClientError(f"{asked}: {reason}{advice(str(reason))}")


def advice(reason: str) -> str:
    """Names the option that helps where a chat template does not take a role."""
    if "continue_final_message" in reason:
        return " (--no-prefill gives no beginnings of answers)"
    if "role" in reason.lower():
        return " (--no-system-role puts the instructions into the user's turn)"
    return ""
