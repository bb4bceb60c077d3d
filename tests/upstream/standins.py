# SPDX-License-Identifier: Apache-2.0
"""Makes the models that upstream's tests ask for, small and random, in a hub cache.

    .venv/bin/python -m tests.upstream.standins            # all
    .venv/bin/python -m tests.upstream.standins NAME ...   # these

A stand-in has the architecture, the special tokens and the sizes of vocabulary,
context and heads of the model of its name, two layers and two heads. It says nothing
of what that model would: tests that know the real one's text fail on both sides.
"""

import hashlib
import json
import os
import shutil
import sys
from pathlib import Path

import torch
import transformers
from tests.upstream import sides, standin_tokenizers
from tests.upstream.standin_kinds import KINDS
from tests.upstream.standin_models import MODELS, Standin
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

HUB = sides.BUILD / "huggingface" / "hub"
SPREAD = 0.15
"""Standard deviation of the weights; at Transformers' 0.02 all tokens are as likely."""


def snapshot(name: str) -> Path:
    """The folder in which the hub's client looks for a model's files."""
    revision = hashlib.sha1(name.encode()).hexdigest()
    return HUB / f"models--{name.replace('/', '--')}" / "snapshots" / revision


def is_made(name: str) -> bool:
    """Whether a stand-in is there and made as it would be now."""
    made = HUB.parent / "made" / recipe(name) / "config.json"
    there = snapshot(name) / "config.json"
    return made.exists() and there.exists() and made.samefile(there)


def make(name: str) -> Path:
    """Make one stand-in anew.

    Returns:
        its snapshot.

    """
    standin, folder = MODELS[name], snapshot(name)
    repository = folder.parents[1]
    shutil.rmtree(repository, ignore_errors=True)
    folder.mkdir(parents=True)
    # Models that differ in their names alone share their files.
    source = HUB.parent / "made" / recipe(name)
    if not source.exists():
        partial = source.with_suffix(f".{os.getpid()}")
        _save(standin, partial)
        partial.rename(source)
    for file in source.iterdir():
        os.link(file, folder / file.name)
    (repository / "refs").mkdir()
    # Last: what was interrupted has no revision.
    (repository / "refs" / "main").write_text(folder.name)
    return folder


def _save(standin: Standin, folder: Path) -> None:
    folder.mkdir(parents=True)
    config = getattr(transformers, standin.config)(**standin.options)
    config.architectures = [standin.architecture]
    if standin.weights:
        torch.manual_seed(0)
        _model(standin, config).save_pretrained(folder)
    config.save_pretrained(folder)
    if standin.tokenizer:
        standin_tokenizers.make(standin.tokenizer).save_pretrained(folder)
    if standin.processor:
        name, options = standin.processor
        getattr(transformers, name)(**options).save_pretrained(folder)
    for name, content in standin.files.items():
        (folder / name).write_text(json.dumps(content))
    ends = {
        key: standin.options[key]
        for key in ("bos_token_id", "eos_token_id", "pad_token_id")
        if key in standin.options
    }
    if ends and standin.generates:
        GenerationConfig(**ends).save_pretrained(folder)


def _model(standin: Standin, config) -> PreTrainedModel:
    known = getattr(transformers, standin.architecture, None)
    model = AutoModelForCausalLM.from_config(config) if known is None else known(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=SPREAD)
    return model.to(getattr(torch, standin.dtype))


def recipe(name: str) -> str:
    """Digest of what a stand-in is made by."""
    standin, here = MODELS[name], Path(__file__).parent
    total = hashlib.sha256(transformers.__version__.encode())
    total.update(repr((standin, KINDS.get(standin.tokenizer))).encode())
    for file in ("standins.py", "standin_tokenizers.py"):
        total.update((here / file).read_bytes())
    return total.hexdigest()[:16]


def main(names: list[str]) -> None:
    """Make what is missing, or the named ones anew; prints the recipes as JSON."""
    transformers.utils.logging.disable_progress_bar()
    for name in names or MODELS:
        if names or not is_made(name):
            make(name)
            print(name, file=sys.stderr, flush=True)
    print(json.dumps({name: recipe(name) for name in MODELS}))


if __name__ == "__main__":
    main(sys.argv[1:])
