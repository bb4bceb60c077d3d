# SPDX-License-Identifier: Apache-2.0
"""What `examples/applications/utio/utio_calibrate.py` reads, refuses and leaves behind."""

import errno
import io
import json
import math
import os
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from calibrations import (
    HIDDEN,
    LAYERS,
    ROOT,
    arguments,
    folder,  # noqa: F401
)
from tiny_models import CONFIGS, make_tokenizer
from torch import nn
from transformers import AutoModelForCausalLM


def test_windows_hold_each_token_once_and_start_as_the_tokenizer_does():
    from utio_texts import count, cut, split

    class Letters:
        """A token a letter, and a first one that begins every text."""

        def encode(self, text, add_special_tokens=True):
            return [0] * add_special_tokens + [ord(letter) for letter in text]

    texts = ["".join(chr(1000 * i + j) for j in range(98 * i)) for i in (1, 2, 3)]
    everything = cut(Letters(), texts, 10, 10**6)
    assert all(window[0] == 0 and 3 <= len(window) <= 10 for window in everything)
    ids = [i for window in everything for i in window[1:]]
    assert sorted(ids) == sorted(ord(letter) for text in texts for letter in text)
    owners = [window[1] // 1000 for window in everything]
    assert sum(a != b for a, b in zip(owners, owners[1:])) == 2  # texts together

    some = cut(Letters(), texts, 10, 100)
    assert count(some) == 100
    assert some == cut(Letters(), texts, 10, 100)
    fitted, held_out = split(some, 0.25)
    assert fitted + held_out == some
    assert 25 <= count(held_out) < 25 + 8


def test_no_window_has_what_the_tokenizer_puts_after_a_text():
    from utio_texts import cut

    class Ended:
        def encode(self, text, add_special_tokens=True):
            ids = [ord(letter) for letter in text]
            return [0, *ids, 1] if add_special_tokens else ids

    [window] = cut(Ended(), ["abc"], 10, 100)
    assert window == [0, *map(ord, "abc")]


def test_no_text_takes_all_while_others_have_some():
    from utio_texts import cut

    class Words:
        def encode(self, text, **kwargs):
            return [int(word) for word in text.split()]

    texts = [" ".join([str(i)] * 1200) for i in range(300)]
    windows = cut(Words(), texts, 12, 1000)
    assert len({window[0] for window in windows}) == 100


def options(**given) -> SimpleNamespace:
    return SimpleNamespace(**({"text": None, "archive": Path("none.tar.gz")} | given))


def test_folders_give_their_utf8_files(tmp_path):
    from utio_texts import chunks_of, read_texts

    def read(path: Path) -> list[str]:
        return ["".join(chunks_of(text)) for text in read_texts(options(text=[path]))]

    (tmp_path / "below").mkdir()
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "a.txt").write_text("ä", encoding="utf-8")
    (tmp_path / "below" / "b").write_text("b")
    (tmp_path / "blank").write_text(" \n")
    (tmp_path / "c.txt").write_bytes(b"1\r\n2\r")
    (tmp_path / "picture").write_bytes(b"\xff\xfe\x00")
    (tmp_path / ".hidden" / "c").write_text("c")
    assert read(tmp_path) == ["ä", "b", "1\r\n2\r"]
    assert read(tmp_path / "c.txt") == ["1\r\n2\r"]


def test_the_default_text_is_what_the_reference_model_was_trained_on(tmp_path):
    from utio_calibrate import parse_args
    from utio_texts import read_texts

    sys.path.insert(0, str(ROOT / "examples" / "reference_model"))
    from corpus import is_held_out

    names = [f"vllm/file_{i}.py" for i in range(300)]
    held_out = [name for name in names if is_held_out(name)]
    assert 0 < len(held_out) < 30
    archive = tmp_path / "archive.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        for name in names:
            member = tarfile.TarInfo(f"vllm-1/{name}")
            member.size = len(name)
            tar.addfile(member, io.BytesIO(name.encode()))
    argv = ["--cutoffs", "1", "--output", str(tmp_path / "x"), "--device", "cpu"]
    args = parse_args([*argv, "--archive", str(archive)])
    assert sorted(read_texts(args)) == sorted(set(names) - set(held_out))
    assert args.model == str(ROOT / "examples/reference_model/model")
    assert (args.tokens, args.context_length, args.holdout) == (100_000, 256, 0.2)


REFUSED = {
    "cutoff 0": (["--cutoffs", "0"], "--cutoffs"),
    "all layers": (["--cutoffs", "2", str(LAYERS)], "--cutoffs"),
    "more layers": (["--cutoffs", str(LAYERS + 3)], "--cutoffs"),
    "a cutoff twice": (["--cutoffs", "3", "3"], "--cutoffs"),
    "few tokens": (["--tokens", "100"], "--tokens"),
    "few tokens in a half": (["--tokens", "360", "--holdout", "0.35"], "--tokens"),
    "no tokens": (["--tokens", "0"], "--tokens"),
    "no probe": (["--probe-width", "0"], "--probe-width"),
    "no translator": (["--translator-width", "0"], "--translator-width"),
    "no such text": (["--text", "no/such/file"], "--text"),
    "no text named": (["--text"], "--text"),
    "no such model": (["--model", "/no/such/model"], "--model"),
    "context of 3": (["--context-length", "3"], "--context-length"),
    "long context": (["--context-length", "513"], "--context-length"),
    "all held out": (["--holdout", "1"], "--holdout"),
    "empty batch": (["--batch-size", "0"], "--batch-size"),
    "no such device": (["--device", "abacus"], "--device"),
    "no such folder": (["--output", "/no/such/folder/x"], "--output"),
}


def refusal(argv: list[str], capsys) -> str:
    import utio_calibrate

    with pytest.raises(SystemExit) as caught:
        utio_calibrate.main(argv)
    assert caught.value.code not in (0, None)
    printed = capsys.readouterr().err.splitlines()
    return str(caught.value.code) if caught.value.code != 2 else printed[-1]


@pytest.mark.parametrize(("more", "option"), REFUSED.values(), ids=REFUSED)
def test_refusals_name_the_option(more, option, folder, tmp_path, capsys):
    output = tmp_path / "probe.safetensors"
    assert option in refusal(arguments(folder("deep_llama"), output, *more), capsys)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["not UTF-8", "blank", "empty folder"])
def test_texts_that_cannot_be_read_are_refused(kind, folder, tmp_path, capsys):
    text = tmp_path / "text"
    if kind == "empty folder":
        text.mkdir()
    else:
        text.write_bytes(b"\xff\xfe\xfd" if kind == "not UTF-8" else b" \n")
    output = tmp_path / "probe.safetensors"
    argv = arguments(folder("deep_llama"), output, "--text", str(text))
    message = refusal(argv, capsys)
    assert "--text" in message and str(text) in message
    assert not output.exists()


def test_a_missing_archive_is_refused(folder, tmp_path, capsys):
    argv = ["--model", str(folder("deep_llama")), "--cutoffs", "2", "--device", "cpu"]
    argv += ["--archive", str(tmp_path / "no"), "--output", str(tmp_path / "x")]
    message = refusal(argv, capsys)
    assert "--archive" in message and "--text" in message


def test_other_families_are_refused(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    message = refusal(arguments(tmp_path, tmp_path / "x"), capsys)
    assert "--model" in message and "gpt2" in message


def test_overflow_is_refused_not_fitted(folder, tmp_path, capsys):
    model = AutoModelForCausalLM.from_pretrained(folder("deep_llama"))
    with torch.no_grad():
        model.model.layers[4].mlp.down_proj.weight.fill_(math.inf)
    model.save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    output = tmp_path / "probe.safetensors"
    assert "--dtype" in refusal(arguments(tmp_path / "model", output), capsys)
    assert not output.exists()


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    from utio_calibrate import Probes, write

    def fail(*_):
        raise OSError("disk full")

    output = tmp_path / "probe.safetensors"
    output.write_bytes(b"old")
    probe = nn.Sequential(nn.Linear(HIDDEN, 4), nn.GELU(), nn.Linear(4, 1))
    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(SystemExit, match="--output.*disk full"):
        model = AutoModelForCausalLM.from_config(CONFIGS["deep_llama"])
        write(output, Probes([probe], [probe], [probe]), [], 1, [2], model)
    assert output.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [output]


def test_a_full_disk_is_said_to_be_one(folder, tmp_path, monkeypatch, capsys):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    said = refusal(arguments(folder("deep_llama"), tmp_path / "probe"), capsys)
    assert "--output" in said and "No space left" in said
    assert not list(tmp_path.iterdir())
