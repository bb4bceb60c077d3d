# SPDX-License-Identifier: Apache-2.0
"""Texts as streams: the tokens of the whole, in memory that does not grow with it."""

import subprocess
import sys
import tracemalloc
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from tiny_models import make_tokenizer
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES / "applications"))

from compare import texts
from compare.texts import ByteCounter, Encoder, encode_stream
from compare.windows import cut

SOURCE = "".join(path.read_text() for path in sorted(EXAMPLES.parent.glob("*/*.py")))


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(texts, "PIECE", 3000)
    monkeypatch.setattr(texts, "CONTEXT", 200)


def with_ends(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """One that puts a special token before and after a text, as BERT's."""
    from tokenizers.processors import TemplateProcessing

    ends = [("<s>", 0), ("</s>", 1)]
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.post_processor = TemplateProcessing(
        single="<s> $A </s>", special_tokens=ends
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>"
    )


def with_prefix() -> PreTrainedTokenizerFast:
    """One that puts a space before a text, and has no places to cut at, as Llama 2's:
    a part has a token that the whole has not."""
    alphabet = sorted(set(SOURCE) - {" "} | {"▁"})
    words = {word: number for number, word in enumerate(["<unk>", *alphabet])}
    backend = Tokenizer(models.BPE(words, [], unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


def reference_tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(EXAMPLES / "reference_model" / "model")


TOKENIZERS = {
    "byte level": make_tokenizer,
    "reference": reference_tokenizer,
    "special tokens": lambda: with_ends(make_tokenizer()),
    "prefix": with_prefix,
    "none at ends": lambda: with_split(make_tokenizer()),
}


def with_split(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """One that splits at spaces alone, so that words go over line ends."""
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(" ", "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_tokens_of_pieces_are_those_of_the_whole(name, small_pieces):
    tokenizer = TOKENIZERS[name]()
    text = SOURCE[:40_000]
    for chunk in (1000, 7777):
        chunks = [text[i : i + chunk] for i in range(0, len(text), chunk)]
        pieces = [*encode_stream(Encoder(tokenizer), chunks)]
        assert [i for piece in pieces for i in piece] == tokenizer.encode(text)
        if name in ("byte level", "reference"):
            assert len(pieces) >= 8


def test_a_text_without_line_ends_is_tokenized_as_a_whole(small_pieces):
    tokenizer = make_tokenizer()
    text = SOURCE[:20_000].replace("\n", " ")
    chunks = [text[i : i + 1000] for i in range(0, len(text), 1000)]
    pieces = [*encode_stream(Encoder(tokenizer), chunks)]
    assert [i for piece in pieces for i in piece] == tokenizer.encode(text)


@pytest.mark.parametrize(
    "text",
    [
        *("", "a", "\n" * 9000, "one\r\ntwo\r\n\r\n" * 900),
        "é" * 4000 + "\n\n" + "b" * 4000,
    ],
)
def test_odd_texts(text, small_pieces):
    tokenizer = with_ends(make_tokenizer())
    pieces = [*encode_stream(Encoder(tokenizer), [text] if text else [])]
    assert [i for piece in pieces for i in piece] == tokenizer.encode(text)


READ_ALL = """
import resource, sys
from pathlib import Path
sys.path[:0] = sys.argv[1:4]
from transformers import AutoTokenizer
import score_kld, utio_texts
from compare.texts import ByteCounter, stream_windows, read_file

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

def compare(path):  # and score_kld, score_perplexity
    windows = stream_windows(tokenizer, [read_file(path)], 512, 256)
    counter, scored, size = ByteCounter(tokenizer), 0, 0
    for call in score_kld.calls(windows, 2**15):
        scored += sum(window.scored for window in call)
        size += counter.add(call)
    return scored, size + counter.rest()

def calibrate(path):
    windows = utio_texts.cut(tokenizer, [path], 256, 20_000)
    return utio_texts.count(windows), len({*map(tuple, windows)})

path, few = map(Path, sys.argv[4:6])
tokenizer = AutoTokenizer.from_pretrained(sys.argv[6])
read = {"compare": compare, "calibrate": calibrate}[sys.argv[7]]
read(few)
before = peak()
print(*read(path), (peak() - before) * 1024)
"""
WIKITEXT = 12_600_000
"""Bytes of WikiText-2's raw splits for training and test together."""
BOUND = 48 * 2**20
"""Peak memory above that of a quarter of it, bytes. Its 4 million tokens as Python
integers are 160 MB."""


@pytest.fixture(scope="module")
def wikitext(tmp_path_factory) -> list[Path]:
    """A text of the size and form of WikiText-2, and the first quarter of it."""
    rng = np.random.default_rng(0)
    words = sorted(set(SOURCE.split()) - {"="})
    lines, size = [], 0
    while size < WIKITEXT:
        drawn = (words[i] for i in rng.integers(0, len(words), rng.integers(20, 120)))
        new = [f" {' '.join(drawn)} "]
        if rng.random() < 0.1:
            new = ["", f" = {rng.choice(words)} = ", "", *new]
        lines += new
        size += sum(len(line.encode()) + 1 for line in new)
    paths = []
    for name, part in (("all", len(lines)), ("few", len(lines) // 4)):
        paths.append(tmp_path_factory.mktemp("wikitext") / name)
        paths[-1].write_text("\n".join(lines[:part]))
    return paths


@pytest.mark.parametrize("reader", ["compare", "calibrate"])
def test_a_text_of_wikitexts_size_is_read_in_bounded_memory(wikitext, reader):
    applications = EXAMPLES / "applications"
    paths = [applications / "kld", applications / "utio", applications, *wikitext]
    model = EXAMPLES / "reference_model" / "model"
    done = subprocess.run(
        [sys.executable, "-s", "-c", READ_ALL, *paths, model, reader],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    scored, size, grown = map(int, done.stdout.split())
    assert grown < BOUND
    if reader == "compare":
        assert scored > 3_000_000
        assert size == pytest.approx(wikitext[0].stat().st_size, abs=8)
    else:
        assert scored == 20_000 and size == 79  # windows, none twice


def test_bytes_of_characters_that_calls_part(small_pieces):
    tokenizer = make_tokenizer()
    text = "日本語 text — naïve ✓ " * 40
    ids = tokenizer.encode(text)
    for size in (3, 5, 8):
        windows = cut(ids, size, size - 1)
        counter = ByteCounter(tokenizer)
        total = sum(counter.add([window]) for window in windows) + counter.rest()
        first = len(text.encode()) - len(tokenizer.decode(ids[1:]).encode())
        # A character whose first byte is not scored is shown as a replacement.
        assert abs(total - (len(text.encode()) - first)) <= 4
        assert sum(window.scored for window in windows) == len(ids) - 1


def test_a_data_set_is_not_read_at_once(tmp_path):
    from datasets import Dataset

    rows = Dataset.from_dict({"text": [f"row {n} " * 50 for n in range(50_000)]})
    few = [*islice(texts.join_rows(rows, "text"), 2)]
    assert few[0].startswith("row 0 ") and few[1].startswith("\n\nrow 1000 ")
    tracemalloc.start()
    total = sum(map(len, texts.join_rows(rows, "text")))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert total > 20_000_000 and peak < 5_000_000
