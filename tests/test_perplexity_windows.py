# SPDX-License-Identifier: Apache-2.0
"""The window arithmetic of `examples/score_perplexity.py`."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

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
    from score_perplexity import sliding_windows

    expected = [
        window
        for window in labels_as_hugging_face_makes_them(length, context, stride)
        if window[2]
    ]
    got = [
        (begin, end, list(range(end - scored, end)))
        for begin, end, scored in sliding_windows(length, context, stride)
    ]
    assert got == expected


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(("context", "stride"), SHAPES)
def test_every_token_but_the_first_counts_once(length, context, stride):
    from score_perplexity import cut

    windows = cut(list(range(length)), context, stride)
    counted = [i for ids, scored in windows for i in ids[len(ids) - scored :]]
    holes = set(range(0, length, stride)) if stride == context else {0}
    assert counted == [i for i in range(length) if i not in holes]
    assert all(
        len(ids) <= context and 1 <= scored < len(ids) for ids, scored in windows
    )


@pytest.mark.parametrize("positions", [0, 1, 6, 7, 8, 12, 1000])
def test_first_positions(positions):
    from score_perplexity import cut, first_positions

    windows = cut(list(range(30)), 8, 4)
    few = first_positions(windows, positions)
    counted = [i for ids, scored in few for i in ids[len(ids) - scored :]]
    assert counted == list(range(1, 30))[:positions]
    for short, whole in zip(few, windows):
        assert short.token_ids == whole.token_ids[: len(short.token_ids)]


def test_calls_hold_all_windows_in_order(monkeypatch):
    import score_perplexity
    from score_perplexity import calls, cut

    windows = cut(list(range(100)), 8, 4)
    assert list(calls(windows)) == [windows]
    monkeypatch.setattr(score_perplexity, "TOKENS_PER_CALL", 20)
    split = list(calls(windows))
    assert [window for call in split for window in call] == windows
    assert all(sum(len(w.token_ids) for w in call) <= 20 for call in split)


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


def test_a_dataset_is_one_text(tmp_path):
    from score_perplexity import parse_args, read_texts

    rows = [{"passage": f"row {n}"} for n in range(5)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "test.jsonl").write_text(lines)
    arguments = ["--dataset", str(tmp_path), "--text-column", "passage"]
    assert read_texts(parse_args([*arguments, "--num-samples", "3"])) == [
        "row 0\n\nrow 1\n\nrow 2"
    ]
    assert len(read_texts(parse_args(arguments))[0].split("\n\n")) == 5


def test_a_text_is_scored_as_it_is(tmp_path):
    from score_perplexity import parse_args, read_texts

    path = tmp_path / "text.txt"
    path.write_bytes("é\r\n\n".encode())
    assert read_texts(parse_args(["--text", str(path)])) == ["é\r\n\n"]
    path.write_bytes("é".encode("latin-1"))
    with pytest.raises(SystemExit, match="nowhere.txt: No such file"):
        read_texts(parse_args(["--text", str(tmp_path / "nowhere.txt")]))
    with pytest.raises(SystemExit, match="text.txt is not UTF-8"):
        read_texts(parse_args(["--text", str(path)]))


@pytest.mark.parametrize(
    "wrong",
    [
        ["--held-out", "/nowhere.tar.gz"],
        ["--held-out", __file__],
        ["--dataset", "/nowhere"],
        ["--text-column", "passage"],
        ["--dataset-split", "dev"],
    ],
)
def test_texts_that_are_not_there_are_refused(wrong, tmp_path):
    from score_perplexity import parse_args, read_texts

    (tmp_path / "test.jsonl").write_text('{"text": "a"}\n')
    given = [] if wrong[0] in ("--held-out", "--dataset") else ["--dataset", tmp_path]
    args = parse_args([*map(str, given), *wrong])
    with pytest.raises(SystemExit, match=f"error: .*{' '.join(wrong)}"):
        read_texts(args)


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
def test_an_engine_that_does_not_start_says_why(wrong, said, monkeypatch):
    from score_perplexity import parse_args, start_engine

    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    with pytest.raises(SystemExit) as error:
        start_engine(parse_args(["--text", "a", "--enforce-eager", *wrong]))
    assert str(error.value).startswith("error: ") and said in str(error.value)


def test_tokenizers_that_know_no_verbose():
    """As Mistral's own, which is none of Transformers'."""
    from score_perplexity import tokenize

    tokenizer = SimpleNamespace(encode=lambda text: [*text.encode()])
    llm = SimpleNamespace(get_tokenizer=lambda: tokenizer)
    assert tokenize(llm, ["ab", "cd"], 3) == [[97, 98], [99]]
