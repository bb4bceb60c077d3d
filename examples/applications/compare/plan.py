# SPDX-License-Identifier: Apache-2.0
"""What to compare, from YAML or the command line, checked before anything starts."""

import ast
import hashlib
import importlib.util
import json
import re
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from compare.windows import NAMED_PER_CALL

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")
NOISE = "noise floor"
FLOOR = "noise-floor"  # name of its model
DTYPES = ("auto", "half", "float16", "bfloat16", "float", "float32")
OURS = {
    "model": "path",
    "max_model_len": "context_length",
    "max_logprobs": "top_k",
    "enable_prefix_caching": None,
    "logprobs_mode": None,
}
"""vLLM's options that the program sets, and what of the plan they follow."""
MAX_SCORES = 2**24  # as vllm.target_logprobs
AtLeast1 = Annotated[int, Field(ge=1)]


class PlanError(Exception):
    """A plan that can not be carried out; the message names what is at fault."""


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Model(Strict):
    """A model and how vLLM runs it."""

    path: str  # folder or name at a hub
    name: str | None = None
    dtype: Literal[DTYPES] = "auto"
    quantization: str | None = None
    tensor_parallel_size: AtLeast1 = 1
    size_on_disk: AtLeast1 | None = None  # bytes, where it is not that of the weights
    options: dict[str, Any] = {}  # vLLM's engine arguments, by their Python names

    @model_validator(mode="before")
    @classmethod
    def _of_a_string(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check(self) -> "Model":
        looks_local = self.path.startswith((".", "/", "~")) or self.path.count("/") > 1
        if looks_local and not Path(self.path).expanduser().is_dir():
            raise ValueError(f"there is no folder {self.path}")
        for name in self.options:
            if name in OURS or name in Model.model_fields:
                instead = OURS.get(name, name) or "nothing, it is set by the program"
                raise ValueError(f"options: {name} can not be given here: {instead}")
            if name not in engine_arguments():
                raise ValueError(f"options: vLLM has no engine argument {name}")
        return self

    @property
    def label(self) -> str:
        return self.name or Path(self.path).name

    @property
    def folder(self) -> str:
        """`path`, expanded if it is a folder."""
        path = Path(self.path).expanduser()
        return str(path) if path.is_dir() else self.path


class Texts(Strict):
    """One of `text`, `held_out` and `dataset`, as the options of the same names."""

    text: list[Path] | None = None
    held_out: Path | None = None
    dataset: str | None = None
    dataset_config: str | None = None
    dataset_split: str = "test"
    text_column: str = "text"
    num_samples: AtLeast1 | None = None
    limit_tokens: AtLeast1 | None = None

    @field_validator("text", mode="before")
    @classmethod
    def _of_one_file(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check(self) -> "Texts":
        given = [n for n in ("text", "held_out", "dataset") if getattr(self, n)]
        if len(given) != 1:
            raise ValueError("give one of text, held_out and dataset")
        for path in [*(self.text or []), *filter(None, [self.held_out])]:
            if not path.is_file():
                raise ValueError(f"{given[0]}: there is no file {path}")
        return self


class Plan(Strict):
    """A reference, models to compare with it, and the text."""

    reference: Model
    candidates: list[Model] = []
    texts: Texts
    context_length: Annotated[int, Field(ge=2)] = 512
    stride: AtLeast1 | None = None  # default: half the context
    top_k: AtLeast1 = 64
    tail_samples: Annotated[int, Field(ge=2)] = 16
    call_tokens: AtLeast1 = 2**15  # prompt tokens of a call, and of a file
    noise_floor: bool = True
    noise_dtype: Literal[DTYPES] | None = None

    @model_validator(mode="after")
    def _check(self) -> "Plan":
        if self.stride is not None and self.stride > self.context_length:
            raise ValueError("stride must be from 1 to context_length")
        named = 1 + self.top_k + self.tail_samples
        if (self.context_length - 1) * named > MAX_SCORES:
            raise ValueError(
                f"top_k: a window has up to {self.context_length - 1} x {named} scores, "
                f"vLLM takes {MAX_SCORES} a request"
            )
        labels = [self.reference.label, *(model.label for model in self.candidates)]
        for label in labels:
            if not NAME.fullmatch(label):
                raise ValueError(f"{label!r} is no name: letters, digits and ._+- only")
            if label == FLOOR:
                raise ValueError(f"{FLOOR} is the name of what the program makes itself")
            if labels.count(label) > 1:
                raise ValueError(f"two models are called {label}; give one a name")
        return self

    @property
    def tokens_per_call(self) -> int:
        """Prompt tokens of a call; fewer of them where many are named at each."""
        return min(self.call_tokens, NAMED_PER_CALL // (1 + self.top_k + self.tail_samples))

    @property
    def step(self) -> int:
        return self.stride or max(self.context_length // 2, 1)


def check_texts(texts: Texts) -> None:
    """Raises `PlanError` if the files can not be read or have nothing in them: before an
    engine starts."""
    size = 0
    for path in texts.text or []:
        try:
            with path.open(encoding="utf-8", newline="") as file:
                while chunk := file.read(2**20):
                    size += len(chunk)
        except OSError as error:
            raise PlanError(f"texts: {path}: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise PlanError(f"texts: {path} is not UTF-8: {error.reason}") from None
    if texts.text and not size:
        raise PlanError("texts: there is nothing in the files")


def fingerprint(*parts: Any) -> str:
    """A hash of JSON values: files are kept with that of what they depend on."""
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@cache
def engine_arguments() -> frozenset[str]:
    """Names of vLLM's engine arguments, read from its source: to import it takes ten
    seconds."""
    spec = importlib.util.find_spec("vllm")
    path = Path(spec.submodule_search_locations[0]) / "engine" / "arg_utils.py"
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name == "EngineArgs":
            fields = (n.target for n in node.body if isinstance(n, ast.AnnAssign))
            return frozenset(field.id for field in fields)
    raise PlanError(f"{path} has no EngineArgs")


def parse_value(text: str) -> Any:
    """A value of the command line, read as YAML."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def parse_model(text: str) -> dict[str, Any]:
    """A model of the command line, `PATH[,KEY=VALUE...]`."""
    path, *settings = text.split(",")
    model: dict[str, Any] = {"path": path}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise PlanError(f"{text}: KEY=VALUE is wanted instead of {setting}")
        if key.startswith("options."):
            options = model.setdefault("options", {})
            options[key.removeprefix("options.")] = parse_value(value)
        else:
            model[key] = parse_value(value)
    return model


def checked_defaults(content: dict[str, Any]) -> dict[str, Any]:
    defaults = content.get("defaults") or {}
    options = defaults.get("options") or {} if isinstance(defaults, dict) else None
    if not isinstance(options, dict):
        raise PlanError("defaults: a mapping is wanted, and one of options in it")
    if unknown := [name for name in defaults if name not in Model.model_fields]:
        raise PlanError(f"defaults: {unknown[0]}: a model has no such field")
    return defaults


def with_defaults(content: dict[str, Any]) -> dict[str, Any]:
    """The content with `defaults` put into each model that does not say otherwise."""
    content = dict(content)
    defaults = checked_defaults(content)
    content.pop("defaults", None)

    def complete(model: Any) -> Any:
        model = {"path": model} if isinstance(model, str) else model
        if not isinstance(model, dict):
            return model
        own = model.get("options") or {}
        if not isinstance(own, dict):
            return model
        options = {**(defaults.get("options") or {}), **own}
        return {**defaults, **model} | {"options": options}

    if content.get("candidates", 0) is None:  # a heading with nothing below it
        content["candidates"] = []
    if "reference" in content:
        content["reference"] = complete(content["reference"])
    if isinstance(content.get("candidates"), list):
        content["candidates"] = [complete(model) for model in content["candidates"]]
    return content


def make_plan(content: dict[str, Any], source: str) -> Plan:
    """A checked plan, or `PlanError` with the path to what is at fault.

    Args:
        content: what `Plan` has, and `defaults` for all models.
        source: where the content is from, for the message.
    """
    content = with_defaults(content)
    try:
        return Plan.model_validate(content)
    except ValidationError as error:
        found = error.errors()[0]
        where = ".".join(map(str, found["loc"])) or "plan"
        said = found["msg"].removeprefix("Value error, ")
        raise PlanError(f"{source}: {where}: {said}") from None


class OnceLoader(yaml.SafeLoader):
    """YAML in which a key that is there twice is an error: the first one's value would
    be lost without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if twice := [key for key in keys if keys.count(key) > 1]:
            raise yaml.MarkedYAMLError(
                problem=f"{twice[0]} is there twice", problem_mark=node.start_mark
            )
        return super().construct_mapping(node, deep)


def read_yaml(path: Path) -> dict[str, Any]:
    """The file's mapping. Paths in it are relative to where the program is run."""
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), OnceLoader)
    except OSError as error:
        raise PlanError(f"{path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise PlanError(f"{path} is no YAML: {error}") from None
    if not isinstance(content, dict):
        raise PlanError(f"{path}: a mapping is wanted")
    return content
