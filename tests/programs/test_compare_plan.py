# SPDX-License-Identifier: Apache-2.0
"""What `examples/applications/compare` takes and refuses before anything starts."""

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import yaml

PROGRAM = Path(__file__).parents[2] / "examples" / "applications" / "compare"
sys.path.insert(0, str(PROGRAM.parent))

from compare.cli import new_parser, read_plan
from compare.figures import Positions
from compare.files import save_arrays, write_json
from compare.plan import PlanError, make_plan
from compare.reference import Reference
from compare.store import Scores, Store
from compare.windows import Window

MODEL = str(PROGRAM.parents[1] / "reference_model" / "model")
TEXT = str(Path(__file__))


def plan(arguments: list, command: str = "run"):
    args = new_parser().parse_args([command, *map(str, arguments)])
    return read_plan(args.parser, args)


@pytest.fixture
def given(tmp_path) -> list:
    """Arguments that are in order."""
    return ["--reference", MODEL, "--text", TEXT, "--output", tmp_path / "out"]


def test_a_file_and_options_say_the_same(tmp_path, given):
    path = tmp_path / "plan.yaml"
    content = {
        "reference": {"path": MODEL, "dtype": "float32", "name": "r"},
        "candidates": [{"path": MODEL, "name": "c", "options": {"seed": 3}}],
        "defaults": {"options": {"enforce_eager": True, "seed": 1}},
        "texts": {"text": [TEXT], "limit_tokens": 50},
        "context_length": 128,
    }
    path.write_text(yaml.safe_dump(content))
    from_file = plan([path, "--output", tmp_path / "out"])
    options = ["--reference", f"{MODEL},dtype=float32,name=r"]
    options += ["--candidate", f"{MODEL},name=c,options.seed=3"]
    options += ["--option", "enforce_eager=true", "--option", "seed=1"]
    options += ["--text", TEXT, "--limit-tokens", 50, "--context-length", 128]
    assert plan([*options, "--output", tmp_path / "out"]) == from_file
    assert from_file.candidates[0].options == {"enforce_eager": True, "seed": 3}
    assert from_file.step == 64
    over = plan([path, "--top-k", 5, "--output", tmp_path / "out"])
    assert over.top_k == 5 and over.reference == from_file.reference


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["--candidate", "/no/where"], "no folder /no/where"),
        (["--candidate", f"{MODEL},dtype=int3"], "candidates.0.dtype"),
        (["--candidate", f"{MODEL},tensor_parallel_size=0"], "tensor_parallel_size"),
        (["--candidate", f"{MODEL},colour=red"], "candidates.0.colour"),
        (["--candidate", f"{MODEL},red"], "KEY=VALUE is wanted instead of red"),
        (["--candidate", f"{MODEL},name=a/b"], "no name"),
        (["--candidate", MODEL], "two models are called model"),
        (["--option", "enforce_eagerly=true"], "no engine argument enforce_eagerly"),
        (["--option", "max_model_len=3"], "context_length"),
        (["--option", "seed"], "--option seed"),
        (["--stride", 600], "stride"),
        (["--context-length", 1], "context_length"),
        (["--top-k", 0], "top_k"),
        (["--top-k", 40_000], "top_k"),
        (["--tail-samples", 1], "tail_samples"),
        (["--limit-tokens", 0], "limit_tokens"),
        (["--noise-dtype", "int4"], "noise_dtype"),
        (["--text", "/no/where.txt"], "no file /no/where.txt"),
        (["/no/where.yaml"], "/no/where.yaml: No such file"),
        ([TEXT], "no YAML"),
    ],
)
def test_what_can_not_be_done_is_refused_by_name(given, wrong, said, capsys):
    with pytest.raises(SystemExit) as stopped:
        plan([*given, *wrong])
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"texts": {"text": [TEXT]}}, "reference"),
        ({"reference": MODEL}, "texts"),
        ({"reference": MODEL, "texts": {}}, "one of text, held_out and dataset"),
        ({"reference": MODEL, "texts": {"text": [TEXT], "dataset": "a"}}, "one of"),
        ({"reference": MODEL, "texts": {"text": [TEXT]}, "candidate": []}, "candidate"),
        ({"reference": 3, "texts": {"text": [TEXT]}}, "reference"),
        ({"reference": MODEL, "texts": {"text": [TEXT]}, "defaults": 3}, "defaults"),
    ],
)
def test_a_file_that_lacks_something_is_refused(content, said):
    with pytest.raises(PlanError, match=said):
        make_plan(content, "plan.yaml")


def test_help_takes_no_engine_and_less_than_two_seconds_of_a_processor():
    for command in ("run", "report", "quantize"):
        before = time.process_time(), children_time()
        done = subprocess.run(
            [sys.executable, "-X", "importtime", PROGRAM, command, "--help"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert "usage: compare" in done.stdout
        assert children_time() - before[1] < 2
        for heavy in ("torch", "vllm", "transformers", "matplotlib"):
            assert f" {heavy}\n" not in done.stderr


def children_time() -> float:
    import resource

    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_a_folder_keeps_one_comparison(given, tmp_path):
    it = plan(given)
    store = Store(tmp_path / "out")
    store.open_for(it)
    store.open_for(it)
    with pytest.raises(PlanError, match="other top_k and tail_samples"):
        store.open_for(it.model_copy(update={"top_k": 3, "tail_samples": 4}))
    more = it.model_copy(update={"candidates": [it.reference]})
    store.open_for(more)  # another candidate is the same comparison


def test_a_changed_model_of_a_name_is_scored_again(tmp_path):
    from compare.plan import Model

    store = Store(tmp_path / "out")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"a")
    model = Model(path=str(folder))
    scores = store.open_model(model)
    write_json(scores.path(0), {})
    write_json(store.text_path, {"calls": 1})
    assert store.open_model(model).count() == 1 and store.has_all_of(model)
    (folder / "model.safetensors").write_bytes(b"ab")
    assert not store.has_all_of(model)  # and is not reported as if it were that one
    assert store.open_model(model).count() == 0


def test_sizes_do_not_depend_on_times(tmp_path):
    scores = Store(tmp_path).reference
    part = Reference(
        [Window([1, 2, 3], 2)],
        *(np.zeros((2, 4), dtype) for dtype in (np.int32, np.float32)),
        np.zeros(2),
        *(np.zeros((2, 4), dtype) for dtype in (np.int32, np.float32)),
        np.zeros(2, np.float32),
        {"vocabulary": "100"},
    )
    times = [1e-5 / 3, 0.1, 1 / 3, 10, 123.456789]
    for number, seconds in enumerate(times):
        scores.save_reference(number, part, seconds)
    assert len({file.stat().st_size for file in scores.files()}) == 1
    assert scores.seconds() == pytest.approx(sum(times), rel=1e-6)


def test_a_line_of_results_for_each_name(tmp_path):
    store = Store(tmp_path)
    one, other = {"model": "a", "kl": 1}, {"model": "b", "kl": 2}
    for result in (one, other, one, other):
        store.add_result(result)
    assert store.results_path.read_text() == f"{json.dumps(one)}\n{json.dumps(other)}\n"
    with store.results_path.open("a") as file:
        file.write('{"model": "b", "k')  # cut off by a kill
    store.add_result({"model": "a", "kl": 3})
    lines = map(json.loads, store.results_path.read_text().splitlines())
    assert [*lines] == [other, {"model": "a", "kl": 3}]


def test_a_second_run_in_a_folder_is_refused(tmp_path):
    store = Store(tmp_path)
    with store.locked(), pytest.raises(PlanError, match="another run"):
        with store.locked():
            pass
    with store.locked():
        pass


def test_restart_removes_nothing_but_a_comparison(given, tmp_path, capsys):
    from compare.cli import check_output

    out = tmp_path / "out"
    out.mkdir()
    (out / "letter.txt").write_text("dear")
    with pytest.raises(SystemExit):
        check_output(new_parser(), out)
    assert "--output" in capsys.readouterr().err
    (out / "letter.txt").unlink()
    store = Store(out)
    check_output(new_parser(), out)  # of a run that ended at once
    store.open_for(plan(given))
    write_json(store.reference.path(0), {})
    for name in ("letter.txt", "holiday.png", "kl_against_size.png"):
        (out / name).write_text("dear")
    check_output(new_parser(), out)
    store.clear()
    assert {*out.glob("*.*")} == {out / "letter.txt", out / "holiday.png"}
    assert store.reference.count() == 0
    assert not (tmp_path / "out" / "comparison.json").exists()


def test_weights_that_a_hub_sends_do_not_make_another_model(tmp_path, monkeypatch):
    """The first run fetches them, so the second finds what the first did not."""
    from compare.plan import Model
    from compare.store import model_fingerprint, size_on_disk
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    model = Model(path="someone/some-model")
    before = model_fingerprint(model)
    assert size_on_disk(model) is None
    cache = tmp_path / "models--someone--some-model"
    snapshot = cache / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").write_bytes(b"abc")
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("0123")
    assert size_on_disk(model) == 3
    assert model_fingerprint(model) == before


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "nothing in the files"),
        ("é".encode("latin-1"), "not UTF-8"),
    ],
)
def test_a_text_without_characters_is_refused_before_an_engine_starts(
    given, tmp_path, content, said, capsys
):
    from compare.cli import main

    path = tmp_path / "text.txt"
    path.write_bytes(content)
    with pytest.raises(SystemExit) as stopped:
        main(["run", *map(str, given), "--text", str(path)])
    assert stopped.value.code == 2 and said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_report_of_a_run_without_a_whole_reference_is_refused(given, tmp_path, capsys):
    from compare.cli import main

    Store(tmp_path / "out").open_for(plan(given))
    with pytest.raises(SystemExit) as stopped:
        main(["report", *map(str, given)])
    assert stopped.value.code == 2 and "not complete" in capsys.readouterr().err


def test_options_beside_a_file_keep_the_rest_of_it(tmp_path):
    path = tmp_path / "plan.yaml"
    content = {"reference": MODEL, "texts": {"text": TEXT, "num_samples": 3}}
    content["defaults"] = {"options": None, "dtype": "float32"}
    content["candidates"] = None
    path.write_text(yaml.safe_dump(content))
    options = ["--limit-tokens", 7, "--option", "seed=1", "--output", tmp_path / "out"]
    it = plan([path, *options])
    assert it.texts.text == [Path(TEXT)] and it.texts.limit_tokens == 7
    assert it.texts.num_samples == 3
    assert it.reference.options == {"seed": 1} and it.reference.dtype == "float32"
    other = plan([path, "--dataset", "wikitext", "--output", tmp_path / "out"])
    assert other.texts.text is None and other.texts.num_samples is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("reference: a\nreference: b\n", "reference is there twice"),
        ("reference: a\ndefaults: 3\n", "defaults"),
        ("reference: a\ndefaults: {option: {}}\n", "defaults: option"),
        ("reference: [a\n", "no YAML"),
        ("", "a mapping is wanted"),
    ],
)
def test_a_file_with_a_slip_is_refused(tmp_path, given, text, said, capsys):
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    with pytest.raises(SystemExit):
        plan([path, *given, "--option", "seed=1"])
    assert said in capsys.readouterr().err


def test_a_line_that_a_kill_cut_off_is_written_again(tmp_path):
    store = Store(tmp_path)
    store.add_result({"model": "a"})
    store.add_result({"model": "b"})
    whole = store.results_path.read_bytes()
    for cut in (1, 5):
        store.results_path.write_bytes(whole[:-cut])
        store.add_result({"model": "b"})
        assert store.results_path.read_bytes() == whole
    store.add_result({"model": "a"})
    assert store.results_path.read_bytes() == whole


def test_a_file_that_a_kill_cut_off_does_not_count(tmp_path):
    scores = Scores(tmp_path)
    columns = {name: np.zeros(3) for name in Positions._fields}
    metadata = {"seconds": "0.5", "kl_of_fewer": json.dumps({"1": 0.25})}
    save_arrays(scores.path(0), columns, metadata)
    partial = tmp_path / ".00001.safetensors.partial"
    partial.write_bytes(scores.path(0).read_bytes()[:50])
    assert scores.count() == 1 and not scores.has(1)
    positions, fewer = scores.load_positions()
    assert (len(positions.kl), scores.seconds(), fewer) == (3, 0.5, {1: 0.25})


@pytest.mark.parametrize(
    ("dtype", "model_type", "other"),
    [
        ("float32", "llama", "bfloat16"),
        ("float16", "llama", "bfloat16"),
        ("bfloat16", "llama", "float16"),
        ("bfloat16", "gemma3_text", "float32"),  # vLLM refuses float16
    ],
)
def test_the_dtype_of_the_noise_floor(dtype, model_type, other):
    from compare.run import NO_FLOAT16, other_dtype
    from vllm.config.model import _FLOAT16_NOT_SUPPORTED_MODELS

    assert other_dtype({"dtype": dtype, "model_type": model_type}) == other
    assert {*_FLOAT16_NOT_SUPPORTED_MODELS} == NO_FLOAT16


def test_another_vllm_does_not_go_on():
    from compare.reference import Refused, check_same_vllm

    check_same_vllm({"vllm": "1"}, {"vllm": "1"})
    with pytest.raises(Refused, match="vLLM 2, the reference was scored by 1"):
        check_same_vllm({"vllm": "2"}, {"vllm": "1"})


def test_a_file_that_is_damaged_is_named(tmp_path, given, capsys):
    from compare.cli import main

    it = plan(given)
    store = Store(tmp_path / "out")
    store.open_for(it)
    store.reference.path(0).write_bytes(b"damaged")
    store.reference.described = {"dtype": "float32"}
    write_json(store.text_path, {"calls": 1})
    with pytest.raises(SystemExit) as stopped:
        main(["report", *map(str, given)])
    assert str(store.reference.path(0)) in str(stopped.value.code)
