# SPDX-License-Identifier: Apache-2.0
"""Options of the commands. Each can also be an environment variable: ACE_PROVIDER,
ACE_BASE_URL, ACE_API_KEY, ..."""

import hashlib
import os
from pathlib import Path
from typing import Any

from pydantic import Field, SecretStr, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from ace import prompts
from ace.chat import Sampling
from ace.client import REFERENCE_MODEL, ROOT, TEMPLATE, LLMClient, Provider
from ace.loop import PHASES, Options, Phase
from ace.playbook import Playbook

REFERENCE_ENGINE = {"kv_cache_memory_bytes": 2**29}
"""Of vLLM for the reference model: half a GiB is plenty."""


class Common(BaseSettings):
    """Of both commands."""

    model_config = SettingsConfigDict(
        env_prefix="ACE_",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_avoid_json=True,
        cli_hide_none_type=True,
        cli_prog_name="python examples/applications/ace",
        extra="forbid",
    )

    model: str | None = Field(
        None,
        description="folder or hub name, default: the shipped reference model; of a "
        "server: the served name, default: the only one",
    )
    samples: Path = Field(prompts.SHIPPED, description="JSON file, see the README")
    chat_template: Path = Field(
        TEMPLATE, description="for models that have no template of their own"
    )
    system_role: bool = Field(
        True,
        description="give instructions in the system's turn; off: in the user's, for "
        "models whose chat template has no system role",
    )
    prefill: bool = Field(
        True,
        description="give the model the beginning of each answer, as weak and base "
        "models need; among servers only vLLM's can",
    )
    dtype: str = Field("float32", description="of the weights in this process")
    max_model_len: int | None = Field(None, ge=1, description="of vLLM, in tokens")
    enforce_eager: bool = Field(
        True, description="vLLM does not compile the model: starts sooner, runs slower"
    )
    speculative_config: dict[str, Any] | None = Field(
        None, description="JSON, vLLM's own option"
    )
    engine_args: dict[str, Any] = Field(
        {}, description="JSON, any more options of vllm.LLM"
    )
    transformers_batch: int = Field(
        1, ge=1, description="conversations that transformers generates at once"
    )
    temperature: float = Field(0, ge=0, le=2, description="0: greedy")
    top_p: float = Field(1, gt=0, le=1)
    top_k: int = Field(0, ge=0, description="0: all tokens")
    seed: int | None = Field(None, description="of sampling")
    stop: list[str] = Field([], description="JSON, texts that end an answer")
    generator_tokens: int = Field(
        16, ge=1, description="of an answer, at most; the reflector reads all of it"
    )
    reflector_tokens: int = Field(48, ge=1, description="of a reflection, at most")
    curator_tokens: int = Field(64, ge=1, description="of the operations, at most")
    lessons: int = Field(1, ge=1, description="for one call of the curator")
    playbook: Path | None = Field(None, description="to begin with; default: empty")
    max_bullets: int = Field(8, ge=1, description="of the playbook")
    max_chars: int = Field(120, ge=1, description="of a bullet")

    def begin(self) -> Playbook:
        """The playbook to begin with."""
        start = Playbook.load(self.playbook) if self.playbook else Playbook()
        bounds = {"max_bullets": self.max_bullets, "max_chars": self.max_chars}
        book = start.model_copy(update=bounds)
        book.trim()
        return book

    def sampling(self) -> dict[Phase, Sampling]:
        return {
            phase: Sampling(
                max_tokens=getattr(self, f"{phase}_tokens"),
                temperature=self.temperature,
                top_p=self.top_p,
                top_k=self.top_k,
                seed=self.seed,
                stop=tuple(self.stop),
            )
            for phase in PHASES
        }

    def load(self, provider: Provider, **options) -> LLMClient:
        """Loads the model into this process. On a CPU vLLM's engine too has no process
        of its own: they would only take the cores from each other."""
        if provider == "vllm":
            from vllm.platforms import current_platform

            if current_platform.is_cpu():
                os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        engine: dict[str, Any] = {"enforce_eager": self.enforce_eager}
        if self.model is None or Path(self.model).resolve() == REFERENCE_MODEL:
            engine |= REFERENCE_ENGINE
        if self.max_model_len is not None:
            engine["max_model_len"] = self.max_model_len
        if self.speculative_config is not None:
            engine["speculative_config"] = self.speculative_config
        options = {"batch_size": self.transformers_batch} | options
        return LLMClient(
            provider,
            self.model,
            chat_template=self.chat_template,
            system_role=self.system_role,
            dtype=self.dtype,
            engine=engine | self.engine_args,
            **options,
        )


class RunSettings(Common):
    """Improve a playbook over local samples: generator, reflector, curator. Stop it
    with Ctrl-C at any time; the same command goes on. Each option can also be an
    environment variable: ACE_BASE_URL, ACE_API_KEY, ..."""

    provider: Provider = Field("vllm", description="how the model runs")
    rounds: int = Field(3, ge=0, description="of changes to the playbook, at most")
    stop_after: int = Field(
        2, ge=0, description="rounds without a better playbook; 0: never"
    )
    output: Path = Field(
        ROOT / "build" / "ace", description="folder of journal, playbook and report"
    )
    restart: bool = Field(False, description="throw away the journal there")
    base_url: str = Field("http://localhost:8000/v1", description="of the server")
    api_key: SecretStr = Field(SecretStr("EMPTY"), description="for the server")
    timeout: float = Field(
        600, gt=0, allow_inf_nan=False, description="seconds for one answer"
    )
    patience: float = Field(600, ge=0, description="seconds to wait for a server")
    concurrency: int = Field(64, ge=1, description="requests under way at once")

    def options(self) -> Options:
        return Options(
            rounds=self.rounds,
            stop_after=self.stop_after,
            lessons=self.lessons,
            prefill=self.prefill,
            sampling=self.sampling(),
        )

    def connect(self) -> LLMClient:
        if self.provider != "openai":
            return self.load(self.provider)
        return LLMClient(
            "openai",
            self.model,
            system_role=self.system_role,
            base_url=self.base_url,
            api_key=self.api_key.get_secret_value(),
            timeout=self.timeout,
            patience=self.patience,
            concurrency=self.concurrency,
        )

    def identity(self, samples: list[prompts.Sample], start: Playbook) -> dict:
        """What must be the same for a run to go on, beside the client's identity. Not
        the provider, nor how many rounds."""
        options = self.options().model_dump(
            mode="json", exclude={"rounds", "stop_after"}
        )
        given = prompts.digest(samples)
        return {
            "system_role": self.system_role,
            "samples": hashlib.sha256(given.encode()).hexdigest(),
            "playbook": start.model_dump(mode="json"),
            **options,
        }


class BenchSettings(Common):
    """Time the three phases with transformers and with vLLM in this process, batched
    against sequential reflection, and compare the greedy outputs."""

    count: int = Field(50, ge=1, description="samples")
    repeats: int = Field(3, ge=1, description="of each measurement")
    batched: int = Field(
        16, ge=0, description="also transformers with so many at once; 0: not"
    )
    output: Path | None = Field(None, description="JSON file for all figures")

    @field_validator("output")
    @classmethod
    def _can_be_written(cls, path: Path | None) -> Path | None:
        if path and (path.is_dir() or not path.parent.is_dir()):
            raise ValueError(f"{path} is not a file in an existing folder")
        return path
