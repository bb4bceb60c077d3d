# SPDX-License-Identifier: Apache-2.0
"""The settings, the journal and the command of `examples/applications/dual_vllm`, without
a model."""

import asyncio
import json
import os
import re
import sys
from collections import deque
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import AsyncMock

import numpy as np
import pytest
from dual_offline import VOCABULARY, Offline, make_pair, offline
from failing_server import FailingServer, Reply
from scipy.special import log_softmax

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path[:0] = [str(EXAMPLES / "applications"), str(EXAMPLES)]

from common import Journal, JournalError, Model
from dual_vllm import ClientError, CoordinatorConfig, DualVLLMCoordinator, drawn
from dual_vllm import __main__ as program
from dual_vllm.coordinator import GenerationOutput, Sample, end_ids
from dual_vllm.launch import (
    REFERENCE_MODEL,
    LaunchError,
    LocalServer,
    first_layers,
    share_cores,
)
from dual_vllm.replay import record, replay
from dual_vllm.server import Answer, Server, TopK


@pytest.fixture
def folder(tmp_path):
    """Makes a folder of a model with this generation_config.json, or with none; its
    tokenizer's end-of-sequence token is 0."""

    def make(name: str, content: object = None) -> str:
        path = tmp_path / name
        path.mkdir()
        for file in ("config.json", "tokenizer.json", "tokenizer_config.json"):
            (path / file).symlink_to(REFERENCE_MODEL / file)
        if content is not None:
            text = content if isinstance(content, str) else json.dumps(content)
            (path / "generation_config.json").write_text(text)
        return str(path)

    return make


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, {0}),
        ({}, {0}),
        ({"eos_token_id": None}, {0}),
        ({"eos_token_id": 5}, {0, 5}),
        ({"eos_token_id": [5, 9]}, {0, 5, 9}),
    ],
)
def test_end_of_sequence_of_a_model(folder, content, expected):
    assert end_ids(folder("model", content)) == expected


def test_end_of_sequence_of_a_model_without_a_tokenizer(tmp_path):
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 5}')
    assert end_ids(str(tmp_path)) == {5}


def test_end_of_sequence_of_a_model_elsewhere(caplog):
    assert end_ids("/nowhere/model") == set()
    assert "'/nowhere/model' is not here" in caplog.text
    assert "stop_token_ids" in caplog.text


@pytest.mark.parametrize(
    "content", ["{", "[]", {"eos_token_id": "5"}, {"eos_token_id": [5, True]}]
)
def test_broken_generation_config(folder, content):
    path = folder("model", content)
    with pytest.raises(ClientError, match=f"generation_config.json of '{path}'"):
        end_ids(path)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, {0, 5, 7, 9}),
        ({"stop_token_ids": [12, 5]}, {0, 5, 7, 9, 12}),
        ({"ignore_eos": True}, set()),
        ({"ignore_eos": True, "stop_token_ids": [12]}, {12}),
    ],
    ids=str,
)
def test_where_a_sample_stops(folder, settings, expected):
    """At the end-of-sequence tokens of both models; the token is no text."""
    roots = [folder("a", {"eos_token_id": 7}), folder("b", {"eos_token_id": [5, 9]})]
    config = CoordinatorConfig(
        url_a="http://a", url_b="http://b", max_tokens=2, **settings
    )
    dual = Offline(config)
    for server, root in zip(dual.servers, roots):
        server.model = Model("m", root, 100)
    assert dual.stop_ids == expected
    stopped = 0
    for number in range(40):
        # These and one other token are all that is likely.
        logprobs = np.full((2, VOCABULARY), -10.0)
        logprobs[:, [0, 5, 7, 9, 12, 20]] = 0
        sample = Sample(GenerationOutput(number, [3]))
        step = draw_step(dual, sample, log_softmax(logprobs, axis=-1))
        reason = "stop" if step.token_id in expected else None
        assert step.finish_reason == sample.output.finish_reason == reason
        assert len(sample.output.diagnostics) == 1
        dual.set_text(sample.output)
        assert (sample.output.text == "") == (reason == "stop" or step.token_id == 0)
        stopped += reason == "stop"
    assert (stopped > 0) == bool(expected)


MODELS = [Model("a", "/models/a", 100), Model("b", "/models/b", 100)]


@pytest.fixture
def journal_path(tmp_path) -> Path:
    """A journal of two samples, one finished after two tokens."""
    path = tmp_path / "run.jsonl"
    dual = offline(top_k=20)
    samples = make_samples()
    with Journal(path) as journal:
        assert len(drawn.resume(journal, {"seed": 0}, MODELS, samples)) == 2
        for sample, count in zip(samples, (2, 1)):
            drawn.append(journal, [draw_step(dual, sample) for _ in range(count)])
    return path


def make_samples() -> list[Sample]:
    return [Sample(GenerationOutput(n, [5, 6 + n])) for n in range(2)]


def draw_step(dual: Offline, sample: Sample, logprobs: np.ndarray | None = None):
    if logprobs is None:
        logprobs = make_pair(len(sample.output.token_ids))
    order = np.argsort(-logprobs, axis=-1)[:, : dual.config.top_k]
    tops = [TopK(ids, row[ids]) for ids, row in zip(order, logprobs)]
    step = None
    while step is None:
        ids = sample.guess.unknown if sample.guess else np.empty(0, int)
        step = dual._advance(
            sample, tuple(Answer(r[ids], 1.5, t) for r, t in zip(logprobs, tops))
        )
    return step


def test_journal_goes_on(journal_path):
    samples = make_samples()
    with Journal(journal_path) as journal:
        again = [model._replace(max_model_len=200) for model in MODELS]
        assert drawn.resume(journal, {"seed": 0}, again, samples) == deque(samples[1:])
    assert [len(s.output.token_ids) for s in samples] == [2, 1]
    assert [s.output.finish_reason for s in samples] == ["length", None]
    assert samples[0].output.diagnostics[0].entropy_a == 1.5


def test_journal_drops_a_line_that_was_cut(journal_path):
    whole = journal_path.read_bytes()
    for cut in (1, 20):
        journal_path.write_bytes(whole[:-cut])
        samples = make_samples()
        with Journal(journal_path) as journal:
            drawn.resume(journal, {"seed": 0}, MODELS, samples)
        assert [len(s.output.token_ids) for s in samples] == [2, 0]
        assert len(journal_path.read_bytes().splitlines()) == 3


@pytest.mark.parametrize(
    ("settings", "token", "message"),
    [({"seed": 1}, 6, "seed"), ({"seed": 0}, 9, "prompts")],
)
def test_journal_of_another_run(journal_path, settings, token, message):
    samples = make_samples()
    samples[0].output.prompt_token_ids[1] = token
    before = journal_path.read_bytes()
    with Journal(journal_path) as journal, pytest.raises(JournalError, match=message):
        drawn.resume(journal, settings, MODELS, samples)
    assert journal_path.read_bytes() == before


@pytest.mark.parametrize("change", [{"name": "c"}, {"root": "/models/c"}], ids=str)
def test_journal_of_another_model(journal_path, change):
    before = journal_path.read_bytes()
    models = [MODELS[0], MODELS[1]._replace(**change)]
    message = "differs in models"
    with Journal(journal_path) as journal, pytest.raises(JournalError, match=message):
        drawn.resume(journal, {"seed": 0}, models, make_samples())
    assert journal_path.read_bytes() == before


def test_journal_whose_header_was_cut(journal_path):
    """Nothing was drawn then, so it is written again."""
    header = journal_path.read_bytes().splitlines(keepends=True)[0]
    for cut in (0, 10, len(header) - 1):
        journal_path.write_bytes(header[:cut])
        with Journal(journal_path) as journal:
            assert len(drawn.resume(journal, {"seed": 0}, MODELS, make_samples())) == 2
        assert journal_path.read_bytes() == header


def test_journal_in_use(journal_path):
    with Journal(journal_path), pytest.raises(JournalError, match="Another run uses"):
        Journal(journal_path).__enter__()


@pytest.mark.parametrize(
    "content",
    ["no json\n", '{"a": 1}\n', "5\n", '{"a": 1}', "{}\nand a line without end", "\n"],
)
def test_no_journal(tmp_path, content):
    path = tmp_path / "notes.txt"
    path.write_text(content)
    with Journal(path) as journal, pytest.raises(JournalError):
        drawn.resume(journal, {"seed": 0}, MODELS, make_samples())
    assert path.read_text() == content


class Prepared(Offline):
    """Connects to two servers that answer from arrays."""

    tokenizer = SimpleNamespace(
        eos_token_id=0, encode=lambda text: [5, 6], decode=lambda ids, **_: str(ids)
    )
    sizes: list[int]
    """Samples that were asked for at once, of the last round."""

    def __init__(self, config: CoordinatorConfig):
        super().__init__(config)
        for server, model in zip(self.servers, MODELS):
            server.model = model
        self.sizes = []

    async def _both(self, call) -> list:
        return [await call(PreparedServer()) for _ in self.servers]

    async def _ask(self, active: list[Sample]) -> list[list[Answer]]:
        self.sizes.append(len(active))
        await asyncio.sleep(0)
        answers = []
        for sample in active:
            logprobs = make_pair(len(sample.ids))
            order = np.argsort(-logprobs, axis=-1)[:, : self.config.top_k]
            ids = sample.guess.unknown if sample.guess else np.empty(0, int)
            tops = [TopK(row, logs[row]) for row, logs in zip(order, logprobs)]
            answers.append([Answer(r[ids], 0.0, t) for r, t in zip(logprobs, tops)])
        return [*zip(*answers)]


class PreparedServer:
    """What is asked of a server on connecting."""

    connect = AsyncMock()
    ask = AsyncMock()

    async def tokenize(self, text: str) -> list[int]:
        return Prepared.tokenizer.encode(text)

    async def detokenize(self, ids: list[int]) -> str:
        return Prepared.tokenizer.decode(ids)


@pytest.fixture
def sample_all(tmp_path, monkeypatch):
    """Runs the command's part that draws; gives outputs and coordinators."""

    def run(count: int, coordinators: int, out: str = "out", **settings):
        duals = []

        def make(config):
            duals.append(Prepared(config))
            return duals[-1]

        monkeypatch.setattr(program, "DualVLLMCoordinator", make)
        config = CoordinatorConfig(
            url_a="http://a", url_b="http://b", max_tokens=4, **settings
        )
        prompts = [[5, 6 + n] for n in range(count)]
        path = tmp_path / out
        return asyncio.run(program.sample(config, prompts, path, coordinators)), duals

    return run


@pytest.mark.parametrize(
    ("count", "coordinators", "batch_size", "expected"),
    [
        (5, 1, 32, [5]),
        (8, 2, 32, [4, 4]),
        (9, 2, 32, [5, 4]),
        (2, 3, 32, [1, 1, None]),
        (20, 2, 4, [4, 4]),
    ],
)
def test_coordinators_share_the_samples(
    sample_all, count, coordinators, batch_size, expected
):
    alone, _ = sample_all(count, 1, "alone", ignore_eos=True)
    outputs, duals = sample_all(
        count, coordinators, ignore_eos=True, batch_size=batch_size
    )
    assert [dual.sizes[0] if dual.sizes else None for dual in duals] == expected
    assert all(max(dual.sizes, default=0) <= batch_size for dual in duals)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in alone]


def test_a_run_goes_on_with_the_same_stop_tokens(sample_all, tmp_path):
    outputs, _ = sample_all(3, 1)
    for same in ({"stop_token_ids": [0]}, {"stop_token_ids": [0, 0]}):
        again, duals = sample_all(3, 1, **same)
        assert again == outputs and not duals[0].sizes
    before = (tmp_path / "out").read_bytes()
    with pytest.raises(JournalError, match="differs in stop_token_ids"):
        sample_all(3, 1, stop_token_ids=[7])
    assert (tmp_path / "out").read_bytes() == before


def test_stop_tokens_outside_the_vocabulary(sample_all):
    with pytest.raises(ValueError, match=r"stop_token_ids: \[300\] are outside"):
        sample_all(1, 1, stop_token_ids=[299, VOCABULARY])


def test_broken_generation_config_is_told_on_connecting(folder, monkeypatch):
    models = [MODELS[0], Model("b", folder("b", "{"), 100)]
    monkeypatch.setitem(globals(), "MODELS", models)

    async def connect(**settings):
        config = CoordinatorConfig(url_a="http://a", url_b="http://b", **settings)
        async with Prepared(config):
            pass

    with pytest.raises(ClientError, match="generation_config.json of .*b'"):
        asyncio.run(connect())
    asyncio.run(connect(ignore_eos=True))


@pytest.fixture
def http():
    with FailingServer() as server:
        yield server


def connect(http: FailingServer, **options) -> Model:
    async def run() -> Model:
        server = Server(http.url, **options)
        try:
            return await server.connect()
        finally:
            await server.close()

    return asyncio.run(run())


CARDS = b'{"data": [{"id": "a", "root": "/a", "max_model_len": 9}, {"id": "b"}]}'


def test_the_first_model_is_taken(http):
    http.replies = [Reply(CARDS)] * 2
    assert connect(http) == Model("a", "/a", 9)


def test_the_key_is_sent_and_kept_nowhere(sample_all, tmp_path, http):
    connect(http, api_key="sesame")
    assert http.keys == {"Bearer sesame"}
    outputs, _ = sample_all(1, 1, api_key="sesame")
    assert sample_all(1, 1, api_key="another")[0] == outputs
    assert b"sesame" not in (tmp_path / "out").read_bytes()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"data": []}', "serves no model"),
        (b'{"data": [{"id": "a"}]}', "no vLLM server"),
    ],
)
def test_no_model(http, body, message):
    http.replies = [Reply(body)] * 2
    with pytest.raises(ClientError, match=message):
        connect(http)


@pytest.mark.parametrize("url", ["http://host:abc", "localhost", "ftp://host", ""])
def test_no_address(url):
    with pytest.raises(ClientError, match="is no address"):
        DualVLLMCoordinator(CoordinatorConfig(url_a="http://a", url_b=url))


def test_recorded_answers_are_given_again(http):
    async def use(server: Server, text: str) -> list[int]:
        try:
            await server.connect()
            return await server.tokenize(text)
        finally:
            await server.close()

    server = Server(http.url)
    answers = record(server)
    tokens = asyncio.run(use(server, "text"))
    assert len(answers) == 2 and tokens == http.tokenize("text")
    with replay([{}, answers]) as (empty, full):
        assert asyncio.run(use(Server(full), "text")) == tokens
        for url, text in ((full, "other"), (empty, "text")):
            with pytest.raises(ClientError, match="not recorded"):
                asyncio.run(use(Server(url), text))


def test_each_server_has_its_own_cores(monkeypatch, tmp_path):
    cores = sorted(os.sched_getaffinity(0))
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    if len(cores) > 1:
        shares = share_cores(2)
        assert sorted(shares[0] + shares[1]) == cores
        assert abs(len(shares[0]) - len(shares[1])) <= 1
    assert share_cores(len(cores) + 1) == [[]] * (len(cores) + 1)
    server = LocalServer("nowhere", tmp_path / "log", cores=cores[-1:])
    server.start()
    try:
        assert os.sched_getaffinity(server.process.pid) == {cores[-1]}
    finally:
        server.kill()
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0")
    assert share_cores(2) == [[], []]


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_first_layers(model_folder, tmp_path, family):
    """At the same place the next time, so that a run can go on."""
    folder = tmp_path / "part"
    for layers in (1, 1):
        assert first_layers(model_folder(family), layers, folder) == folder
        config = json.loads((folder / "config.json").read_text())
        assert config["num_hidden_layers"] == layers
    assert [path.name for path in tmp_path.iterdir()] == ["part"]


@pytest.mark.parametrize(("family", "name"), [("opt", "OPT"), ("llama", "Llama")])
def test_no_first_layers(model_folder, tmp_path, family, name):
    """They are elsewhere, or there are no more."""
    with pytest.raises(LaunchError, match=f"--model-b: .*{name}"):
        first_layers(
            model_folder(family), 1 if name == "OPT" else 20, tmp_path / "part"
        )


def test_started_models_keep_their_names(tmp_path, monkeypatch):
    """From one run to the next, wherever it is started."""
    started = []

    @contextmanager
    def servers(models, logs, arguments):
        started.append(models)
        yield [SimpleNamespace(url=f"http://{name}") for name in "ab"]

    monkeypatch.setattr(program, "servers", servers)
    monkeypatch.setattr(program, "WORK", tmp_path / "work")
    for folder, model in ((REFERENCE_MODEL.parent, "model"), (tmp_path, None)):
        monkeypatch.chdir(folder)
        options = ["--model-a", model] if model else []
        monkeypatch.setattr(sys, "argv", ["dual_vllm", "sample", *options])
        with program.addresses(program.parse_args()) as urls:
            assert urls == ["http://a", "http://b"]
    assert started[0] == started[1]
    assert started[0][0] == str(REFERENCE_MODEL)
    config = json.loads((Path(started[0][1]) / "config.json").read_text())
    assert config["num_hidden_layers"] == 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--coordinators", "0"], "--coordinators: must be at least 1"),
        (["--samples", "0"], "--samples: must be at least 1"),
        (["--stream", "--out", "somewhere"], "--stream"),
        (["--stream", "--samples", "2"], "--stream"),
        (["--serve-args", "'"], "--serve-args: No closing quotation"),
        (["--prompt", "a", "--prompts", "b"], "--prompts: not allowed with"),
    ],
)
def test_wrong_options(options, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["dual_vllm", "sample", *options])
    with pytest.raises(SystemExit):
        program.main()
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["sample", "--prompts", "/nowhere"], "--prompts /nowhere: No such file"),
        (["sample", "--top-k", "300"], "error: Value error, top_k is 300"),
        (["sample", "--out", str(EXAMPLES)], f"--out {EXAMPLES}: is a folder"),
        (["compare", "--sizes", "20", "300"], "--sizes 300: "),
        (["sample", "--model-a", "/nowhere"], "--model-a /nowhere: "),
    ],
)
def test_no_server_is_started_for_wrong_options(options, message, monkeypatch):
    def servers(*_):
        raise AssertionError("a server was started")

    monkeypatch.setattr(program, "servers", servers)
    monkeypatch.setattr(sys, "argv", ["dual_vllm", *options])
    with pytest.raises(SystemExit) as error:
        program.main()
    assert message in str(error.value)


def test_stop_token_ids_as_options(monkeypatch):
    options = ["--stop-token-ids", "5", "9", "--stop-token-ids", "7"]
    monkeypatch.setattr(sys, "argv", ["dual_vllm", "sample", *options])
    settings = program.settings(
        program.parse_args(), url_a="http://a", url_b="http://b"
    )
    assert settings.stop_token_ids == [5, 9, 7]


def read_prompts(path: Path) -> list:
    return program.read_prompts(SimpleNamespace(prompts=path, prompt=None))


def test_prompts_of_a_file(tmp_path):
    """With a byte-order mark, blank lines, and what only JSON takes for no line end."""
    rows = [
        {"prompt": "one\u2028line\u0085of\x1ctext"},
        {"prompt_token_ids": [5, 6]},
        {"prompt_token_ids": None, "prompt": "two"},
        {"prompt_token_ids": [7], "prompt": "not this one"},
    ]
    path = tmp_path / "prompts"
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    lines[2:2] = ["", " \t"]
    for end in ("\n", "\r\n"):
        path.write_bytes(end.join([*lines, ""]).encode("utf-8-sig"))
        assert read_prompts(path) == [rows[0]["prompt"], [5, 6], "two", [7]]


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "5",
        "[]",
        "null",
        "{}",
        '{"prompt": 5}',
        '{"prompt": null}',
        '{"prompt": ["a"]}',
        '{"prompt_token_ids": 5}',
        '{"prompt_token_ids": "56"}',
        '{"prompt_token_ids": [5, "6"]}',
        '{"prompt_token_ids": [5, true]}',
        '{"prompt_token_ids": [5.0], "prompt": "a"}',
        "[" * 100_000,
    ],
    ids=lambda line: line[:30],
)
def test_wrong_prompts(tmp_path, line):
    path = tmp_path / "prompts"
    path.write_text(f'{{"prompt": "a"}}\n\n{line}\n')
    with pytest.raises(ValueError, match=f"--prompts: line 3 of {path} is no JSON"):
        read_prompts(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "is empty"), (b"\n \n", "is empty"), (b'{"prompt": "\xff"}', "is no UTF-8")],
)
def test_no_prompts(tmp_path, content, message):
    path = tmp_path / "prompts"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"--prompts: {path} {message}"):
        read_prompts(path)


def test_commands_of_the_readme():
    """They are called from where ./build.sh puts them."""
    text = (EXAMPLES / "applications" / "dual_vllm" / "README.md").read_text()
    found = re.findall(r"(\S*)\b(?:python examples|vllm serve \S)", text)
    assert len(found) >= 4
    assert all(place.strip("`").endswith(".venv/bin/") for place in found)
