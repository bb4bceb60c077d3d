# SPDX-License-Identifier: Apache-2.0
"""Settings of a coordinator."""

from typing import Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    SecretStr,
    model_validator,
)


class CoordinatorConfig(BaseModel):
    """Settings. All but the addresses and the last four decide what is drawn."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url_a: str
    url_b: str
    model_a: str | None = None  # served names; by default the first of each server
    model_b: str | None = None
    tokenizer: str | None = None  # folder or hub name; by default that of server a
    seed: int = Field(0, ge=0)
    max_tokens: int = Field(128, ge=1)
    ignore_eos: bool = False
    stop_token_ids: list[NonNegativeInt] = []
    """End a sample, as the end-of-sequence tokens of both models do; with `ignore_eos`
    as well."""
    top_k: int = Field(100, ge=1)
    """Most candidates that each model names for a position."""
    tail_mass: float = Field(0.0, ge=0, lt=1)
    """A model names no more than it needs to leave this mass out, so few where it is
    sure and up to `top_k` where it is not. 0: always `top_k`."""
    tail: Literal["keep", "drop"] = "keep"
    """Tokens that neither model names: drawn as often as q says, or never."""
    max_candidates: int = Field(400, ge=2)
    """What `--max-logprobs` of both servers is, or less."""

    batch_size: int = Field(32, ge=1)
    """Prompts in one request."""
    patience: float = Field(600.0, gt=0)
    """Seconds for which a failing server is tried again. A restart of a small model
    takes a minute on a CPU, of a large one much more."""
    timeout: float = Field(60.0, gt=0, allow_inf_nan=False)
    """Seconds to wait for one answer, from the request to its last byte."""
    api_key: SecretStr = SecretStr("EMPTY")
    """Sent to both servers, as a bearer token."""

    @model_validator(mode="after")
    def _room_for_both_lists(self) -> Self:
        if 2 * self.top_k > self.max_candidates:
            raise ValueError(
                f"top_k is {self.top_k}: two lists of it do not fit max_candidates, "
                f"{self.max_candidates} (the servers' --max-logprobs)"
            )
        return self

    def with_top_k(self, size: int) -> Self:
        """The same but for its `top_k`, checked as any other."""
        return type(self)(**self.model_dump() | {"top_k": size})
