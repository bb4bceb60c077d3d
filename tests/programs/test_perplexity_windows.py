# SPDX-License-Identifier: Apache-2.0
"""The window arithmetic of `examples/score_perplexity.py`."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path[:0] = [str(EXAMPLES), str(EXAMPLES / "applications")]

from compare.texts import Tally, open_texts, stream_windows
from compare.windows import calls, cut, first_positions, windows_of

LENGTHS = [0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 40]
SHAPES = [(2, 1), (2, 2), (3, 2), (8, 1), (8, 3), (8, 4), (8, 7), (8, 8), (64, 5)]


def labels_as_hugging_face_makes_them(length: int, context: int, stride: int) -> list:
    """The loop of https://huggingface.co/docs/transformers/perplexity, token by token:
    for each window its begin, its end and the positions whose loss counts."""
    windows = []
    previous_end = 0
    for begin in range(0, length, stride):
        end = min(begin + context, length)
        masked = [p < previous_end for p in range(begin, end)]
        # The loss shifts the labels by one: a window's first token is never predicted.
        counted = [begin + i for i, m in enumerate(masked) if not m and i > 0]
        windows.append((begin, end, counted))
        previous_end = end
        if end == length:
            break
    return windows


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(("context", "stride"), SHAPES)
def test_the_same_tokens_count_as_in_hugging_faces_loop(length, context, stride):
    expected = [
        window
        for window in labels_as_hugging_face_makes_them(length, context, stride)
        if window[2]
    ]
    got = [
        (ids[0], ids[-1] + 1, ids[len(ids) - scored :])
        for ids, scored in cut([*range(length)], context, stride)
    ]
    assert got == expected


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("piece", [1, 3, 8, 100])
def test_a_text_in_pieces_has_the_windows_of_the_whole(length, piece):
    ids = [*range(length)]
    for context, stride in SHAPES:
        pieces = [ids[i : i + piece] for i in range(0, length, piece)]
        assert [*windows_of(pieces, context, stride)] == cut(ids, context, stride)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(("context", "stride"), SHAPES)
def test_every_token_but_the_first_counts_once(length, context, stride):
    windows = cut(list(range(length)), context, stride)
    counted = [i for ids, scored in windows for i in ids[len(ids) - scored :]]
    holes = set(range(0, length, stride)) if stride == context else {0}
    assert counted == [i for i in range(length) if i not in holes]
    assert all(
        len(ids) <= context and 1 <= scored < len(ids) for ids, scored in windows
    )


@pytest.mark.parametrize("positions", [0, 1, 6, 7, 8, 12, 1000])
def test_first_positions(positions):
    windows = cut(list(range(30)), 8, 4)
    few = first_positions(windows, positions)
    counted = [i for ids, scored in few for i in ids[len(ids) - scored :]]
    assert counted == list(range(1, 30))[:positions]
    for short, whole in zip(few, windows):
        assert short.token_ids == whole.token_ids[: len(short.token_ids)]


def test_calls_hold_all_windows_in_order():
    windows = cut(list(range(100)), 8, 4)
    assert list(calls(windows)) == [windows]
    split = list(calls(windows, 20))
    assert [window for call in split for window in call] == windows
    assert all(sum(len(w.token_ids) for w in call) <= 20 for call in split)
    assert list(calls(windows, 1)) == [[window] for window in windows]
    assert list(calls([])) == []


@pytest.mark.parametrize(
    "wrong",
    [
        ["--stride", "0"],
        ["--stride", "9"],
        ["--context-length", "1"],
        ["--repeat", "0"],
        ["--baseline-full-positions", "-1"],
        ["--kv-cache-memory-bytes", "-5"],
        ["--tensor-parallel-size", "0"],
        ["--json", "/nowhere/report.json"],
    ],
)
def test_impossible_options_are_refused(wrong, capsys):
    from score_perplexity import parse_args

    with pytest.raises(SystemExit):
        parse_args(["--text", "a", "--context-length", "8", *wrong])
    assert wrong[0] in capsys.readouterr().err


def read(*arguments) -> list[str]:
    """The texts that the arguments name, each as a whole."""
    from score_perplexity import parse_args

    return ["".join(text) for text in open_texts(parse_args([*map(str, arguments)]))()]


def test_a_dataset_is_one_text(tmp_path):
    rows = [{"passage": f"row {n}"} for n in range(2500)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "test.jsonl").write_text(lines)
    arguments = ["--dataset", tmp_path, "--text-column", "passage"]
    assert read(*arguments, "--num-samples", "3") == ["row 0\n\nrow 1\n\nrow 2"]
    assert read(*arguments) == ["\n\n".join(row["passage"] for row in rows)]


def test_a_dataset_that_is_none(tmp_path):
    (tmp_path / "test.jsonl").write_text('{"text": "a"}\n{"text"')
    with pytest.raises(SystemExit, match=f"error: --dataset {tmp_path}"):
        read("--dataset", tmp_path)


def test_a_text_is_scored_as_it_is(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes("é\r\n\n".encode())
    assert read("--text", path) == ["é\r\n\n"]
    path.write_bytes("é".encode("latin-1"))
    with pytest.raises(SystemExit, match="nowhere.txt: No such file"):
        read("--text", tmp_path / "nowhere.txt")
    with pytest.raises(SystemExit, match="text.txt is not UTF-8"):
        read("--text", path)


@pytest.mark.parametrize(
    "wrong",
    [
        ["--held-out", "/nowhere.tar.gz"],
        ["--held-out", __file__],
        ["--dataset", "/nowhere"],
        ["--text-column", "passage"],
        ["--text-column", "number"],
        ["--dataset-split", "dev"],
    ],
)
def test_texts_that_are_not_there_are_refused(wrong, tmp_path):
    (tmp_path / "test.jsonl").write_text('{"text": "a", "number": 1}\n')
    given = [] if wrong[0] in ("--held-out", "--dataset") else ["--dataset", tmp_path]
    with pytest.raises(SystemExit, match=f"error: .*{' '.join(wrong)}"):
        read(*given, *wrong)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["--model", "/nowhere"], "/nowhere"),
        (["--dtype", "int3"], "dtype"),
        (["--quantization", "none-such"], "none-such"),
        (["--gpu-memory-utilization", "7"], "--gpu-memory-utilization"),
        (["--context-length", "1000000"], "--context-length"),
        (["--kv-cache-memory-bytes", "1000"], "--kv-cache-memory-bytes"),
    ],
)
def test_an_engine_that_does_not_start_says_why(wrong, said):
    from score_perplexity import parse_args, start_engine

    with pytest.raises(SystemExit) as error:
        start_engine(parse_args(["--text", "a", "--enforce-eager", *wrong]))
    assert str(error.value).startswith("error: ") and said in str(error.value)


def test_tokenizers_that_know_no_verbose():
    """As Mistral's own, which is none of Transformers'."""
    tokenizer = SimpleNamespace(encode=lambda text: [*text.encode()])
    tally = Tally()
    windows = stream_windows(tokenizer, [["ab"], ["c", "d"], ["e"]], 8, 8, 4, tally)
    assert [ids for ids, _ in windows] == [[97, 98], [99, 100]]
    assert (tally.texts, tally.tokens) == (2, 4)
