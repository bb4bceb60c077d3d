# SPDX-License-Identifier: Apache-2.0
"""`examples/applications/icm` without a model: the program against a server that fails on
purpose, its journal and its report."""

import itertools
import json
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from failing_server import BLOCK, SLOW
from icm_runs import (
    connect,  # noqa: F401
    saved,
    server,  # noqa: F401
    settings,
    testbed,  # noqa: F401
)

FOLDER = Path(__file__).parents[2] / "examples" / "applications" / "icm"
sys.path.insert(0, str(FOLDER))

import icm
import testbeds
import verify_server
from common import ClientError, Journal, JournalError
from prompts import Usage
from scorer import Scorer, is_near

# The client


FAULTS = [
    "500",
    "429",
    "gone",
    "slow",
    "half an answer",
    "half of the choices",
    "cut JSON",
    "wrong content type",
]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_changes_nothing(server, testbed, tmp_path, fault, monkeypatch):
    monkeypatch.setattr("common.retry.FIRST_WAIT", 0.01)
    monkeypatch.setattr("common.retry.JITTER", 0.01)
    whole = icm.run(settings(server, testbed, tmp_path / "a", iterations=6))
    server.faults = [None, None, fault, None, fault]  # after the client's own probe
    timeout = SLOW if fault == "slow" else 60
    options = dict(iterations=6, timeout=timeout)
    report = icm.run(settings(server, testbed, tmp_path / "b", **options))
    assert not server.faults
    assert report["retries"] == 2 or (fault == "slow" and report["retries"] > 2)
    assert saved(tmp_path / "a")["state"] == saved(tmp_path / "b")["state"]
    assert report["accuracy"] == whole["accuracy"]


def test_a_refusal_is_shown_and_not_repeated(server, testbed, tmp_path, capsys):
    server.faults = [None, "400"]
    with pytest.raises(SystemExit) as error:
        settings(server, testbed, tmp_path / "out").cli_cmd()
    assert error.value.code == 1
    assert "prompt: too long" in " ".join(capsys.readouterr().out.split())
    assert not server.faults and len(server.bodies) == 1


def test_a_server_that_is_none(server, connect):
    client = connect()
    server.faults = ["wrong content type"] * 10
    with pytest.raises(ClientError, match="text/html.*base_url"):
        client.score([[65]], [[66], [67]])
    assert len(server.faults) == 5


@pytest.mark.parametrize("fault", ["no logprobs", "empty logprobs"])
def test_a_server_without_logprobs(server, testbed, tmp_path, fault, capsys):
    """Is told so at once."""
    server.by_name = False
    server.faults = [None, fault]
    with pytest.raises(SystemExit):
        settings(server, testbed, tmp_path / "out").cli_cmd()
    assert "gives no log-probabilities" in " ".join(capsys.readouterr().out.split())
    assert len(server.bodies) == 2


def test_an_answer_of_another_kind_is_malformed(server, connect):
    server.by_name = False
    client = connect()
    server.faults = ["logprobs of another kind"] * 5
    with pytest.raises(ClientError, match="malformed"):
        client.score(["x"], ["a", "b"])


def test_fewer_top_logprobs(server, testbed, tmp_path):
    server.by_name = False
    server.most_logprobs = 5
    with pytest.raises(ClientError, match="too many.*--top-logprobs"):
        icm.run(settings(server, testbed, tmp_path))
    icm.run(settings(server, testbed, tmp_path, top_logprobs=5, iterations=1))
    assert server.bodies[-1]["logprobs"] == 5


@pytest.mark.parametrize(
    "url", ["localhost:8000", "http://", "http://host:abc", "http://[::1", "ftp://host"]
)
def test_no_address(url, testbed, tmp_path):
    nobody = SimpleNamespace(url=url)
    with pytest.raises(ClientError, match="--base-url"):
        icm.run(settings(nobody, testbed, tmp_path, patience=0))


def test_no_server(tmp_path, testbed, capsys):
    nobody = SimpleNamespace(url="http://127.0.0.1:9")
    with pytest.raises(SystemExit) as error:
        settings(nobody, testbed, tmp_path, patience=0).cli_cmd()
    assert error.value.code == 1
    assert "Is `vllm serve` running?" in " ".join(capsys.readouterr().out.split())


def test_a_key_that_no_header_takes(server, testbed, tmp_path):
    with pytest.raises(ClientError, match="--api-key"):
        icm.run(settings(server, testbed, tmp_path, api_key="ключ"))


def test_wrong_model(connect):
    with pytest.raises(ClientError, match=r"'other', but \['m'\]"):
        connect("other")


def test_labels_must_be_one_token(connect):
    client = connect()
    with pytest.raises(ClientError, match="' True' is 5 tokens"):
        client.encode_labels([" True", "b"])
    with pytest.raises(ClientError, match="not different"):
        client.encode_labels(["b", "b"])


def test_tokenizers_that_put_a_space_in_front(server, connect):
    """As Llama 2's does: a label, and a piece of a prompt, has none of it."""
    server.tokenize = lambda text: [ord(c) for c in " " + text]
    client = connect()
    assert client.encode(["b"], begin=True) == [[32, 98]]
    assert client.encode(["b", "\n", " b", ""]) == [[98], [10], [32, 98], []]
    assert client.encode_labels(["a", "b"]) == [[97], [98]]
    # What joins with a text before it has tokens of its own.
    server.tokenize = lambda text: [len(text)]
    assert client.encode(["bc"]) == [[2]]


def test_tokenizers_that_end_a_text(server, connect):
    """A prompt begins as a text does, and goes on."""
    server.begin, server.end = (1,), (2,)
    client = connect()
    assert client.encode(["b", ""], begin=True) == [[1, 98], [1]]
    assert client.encode(["b"]) == [[98]]


def test_two_clients_at_once(server):
    prompts = [[ord(c) for c in f"prompt {n}"] for n in range(30)]
    expected = [[server.logprob(p, i) for i in (97, 98)] for p in prompts]
    wrong = []

    def work() -> None:
        with Scorer(server.url) as client:
            for _ in range(20):
                scores = client.score(prompts, [[97], [98]]).logprobs
                wrong.extend(scores[scores != expected])

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and len(server.bodies) == 2 + 40


def test_another_server_is_asked_for_top_logprobs(
    server, testbed, tmp_path, caplog, connect
):
    server.by_name = False
    report = icm.run(settings(server, testbed, tmp_path / "out", iterations=5))
    assert "cannot score tokens by name" in caplog.text
    assert all(isinstance(p, str) for p in server.bodies[-1]["prompt"])
    assert report["missing_labels"] == 0
    assert report["cache"]["all iterations"]["hit_rate"] is None

    client = connect()
    scores = client.score(["x"], ["a", "unlisted"]).logprobs
    assert scores[0, 0] == server.logprob("x", "a")
    assert scores[0, 1] == min(server.logprob("x", name) for name in "abcd")
    assert client.unlisted == {"unlisted": 1}


def test_a_label_that_another_server_never_lists(server, tmp_path):
    """As one of several tokens: all its scores would be the same guess."""
    server.by_name = False
    content = {"labels": ["a", "ab"], "examples": [{"text": "x"}, {"text": "y"}]}
    file = tmp_path / "pool.json"
    file.write_text(json.dumps(content))
    with pytest.raises(ClientError, match="label 'ab' is among .* not one example"):
        icm.run(settings(server, file, tmp_path / "out"))


def test_polite_to_others_only(server, monkeypatch, connect):
    """No limit for a server that scores by name or is near; 60 a minute for others."""

    def pace(**options) -> float | None:
        return connect(**options).client.aio.requests_per_minute

    assert pace() is None
    server.by_name = False
    assert pace() is None
    monkeypatch.setattr("scorer.is_near", lambda url: False)
    assert pace() == 60
    assert pace(requests_per_minute=120) == 120


@pytest.mark.parametrize(
    ("host", "near"),
    [
        ("localhost", True),
        ("10.1.2.3", True),
        ("gpu-box", True),
        ("api.example.com", False),
        ("8.8.8.8", False),
    ],
)
def test_which_servers_are_near(host, near):
    assert is_near(f"http://{host}:8000") == near


def test_verify_a_server_without_a_prefix_cache(server, connect):
    client = connect()
    assert "tokens the second time" in verify_server.prefix_cache(client)
    server.look_up = lambda prompt: 0
    with pytest.raises(verify_server.Failure, match="--enable-prefix-caching"):
        verify_server.prefix_cache(client)
    complete = server.complete
    server.complete = lambda body: complete(body) | {"usage": {}}
    with pytest.raises(verify_server.Failure, match="prompt-tokens-details"):
        verify_server.prefix_cache(client)


# The program


def test_one_call_an_iteration(server, testbed, tmp_path):
    """Of all prompts; none where nothing would change."""
    out = tmp_path / "out"
    icm.run(settings(server, testbed, out, fix_rounds=1))
    steps = saved(out)["state"]["history"]
    proposals = sum(step[2] for step in steps)
    probe, zero_shot, start, *bodies = server.bodies
    *bodies, true_labels, random_labels = bodies
    assert 0 < len(bodies) == proposals <= len(steps)
    assert [usage[0] for usage in saved(out)["usage"]] == [step[2] for step in steps]
    for body in (zero_shot, true_labels, random_labels):
        assert len(body["prompt"]) == 16
    # A labelling that contradicts itself comes with its alternatives.
    assert {len(body["prompt"]) for body in bodies} <= {16, 32, 48, 64}


@pytest.mark.parametrize("stop", [1, 2, 7])
def test_an_interrupted_run_goes_on_as_if_it_had_not_been(
    server, testbed, tmp_path, stop, monkeypatch, capsys
):
    """Ctrl-C in the middle of any call: the same random stream, nothing twice."""
    icm.run(settings(server, testbed, tmp_path / "whole"))
    whole = saved(tmp_path / "whole")

    server.cached.clear()
    interrupted = settings(server, testbed, tmp_path / "parts")
    score = Scorer.score
    calls = itertools.count(1)

    def interrupt(self, *args):
        if next(calls) == stop:
            raise KeyboardInterrupt
        return score(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Scorer, "score", interrupt)
        with pytest.raises(SystemExit) as error:
            interrupted.cli_cmd()
    assert error.value.code == 130
    assert "interrupted. Nothing is lost" in capsys.readouterr().err
    icm.run(interrupted)
    parts = saved(tmp_path / "parts")
    assert parts["state"] == whole["state"]
    assert parts["usage"] == whole["usage"]


def test_a_run_in_parts_is_the_same_run(server, testbed, tmp_path):
    icm.run(settings(server, testbed, tmp_path / "whole"))
    for iterations in (0, 7, 7, 16):
        options = dict(iterations=iterations)
        icm.run(settings(server, testbed, tmp_path / "parts", **options))
    assert saved(tmp_path / "parts")["state"] == saved(tmp_path / "whole")["state"]


def test_a_line_that_was_cut(server, testbed, tmp_path):
    """Of an iteration, which is done again; the random stream is the same."""
    icm.run(settings(server, testbed, tmp_path / "whole"))
    icm.run(settings(server, testbed, tmp_path / "parts", iterations=7))
    path = tmp_path / "parts" / icm.JOURNAL
    path.write_bytes(path.read_bytes()[:-20])
    icm.run(settings(server, testbed, tmp_path / "parts"))
    assert saved(tmp_path / "parts")["state"] == saved(tmp_path / "whole")["state"]


def test_a_line_has_what_an_iteration_changed(server, testbed, tmp_path):
    icm.run(settings(server, testbed, tmp_path))
    _, first, *lines = map(json.loads, (tmp_path / icm.JOURNAL).open())
    assert {"labels", "scores", "random_words", "zero_shot"} <= first.keys()
    for line in lines:
        *_, proposed, accepted = line["step"][:4]
        assert accepted == ("labels" in line or "scores" in line) <= proposed
        assert "random_words" not in line  # a few draws of 624


@pytest.mark.parametrize(
    "content", ["[]", "{}", '{"identity": 5}', "\x00", "whole", "line"]
)
def test_a_damaged_journal_is_refused(server, testbed, tmp_path, content):
    icm.run(settings(server, testbed, tmp_path, iterations=1))
    path = tmp_path / icm.JOURNAL
    if content == "whole":  # the first state is missing
        first, _, *others = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(first + b"".join(others))
    elif content == "line":
        path.write_bytes(path.read_bytes() + b"5\n")
    else:
        path.write_text(content)
    with pytest.raises(JournalError, match="is no file of a run"):
        icm.run(settings(server, testbed, tmp_path))
    assert icm.run(settings(server, testbed, tmp_path, restart=True))["iterations"] == 16


def test_two_runs_in_one_folder(server, testbed, tmp_path):
    with (
        Journal(tmp_path / icm.JOURNAL),
        pytest.raises(JournalError, match="Another run"),
    ):
        icm.run(settings(server, testbed, tmp_path))
    assert icm.run(settings(server, testbed, tmp_path))["iterations"] == 16


def test_another_runs_journal_is_refused(server, testbed, tmp_path):
    icm.run(settings(server, testbed, tmp_path, iterations=1))
    with pytest.raises(JournalError, match="differs in alpha, seeds"):
        icm.run(settings(server, testbed, tmp_path, alpha=3, seeds=2))
    with pytest.raises(JournalError, match="differs in pool"):
        icm.run(settings(server, testbed, tmp_path, pool_size=12))
    report = icm.run(settings(server, testbed, tmp_path, alpha=3, restart=True))
    assert report["iterations"] == 16


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("labels", ["b", "a"]),
        ("header", "So:"),
        ("separator", "."),
        ("rule", "same"),
    ],
)
def test_a_testbed_that_was_edited_is_another(server, testbed, tmp_path, field, value):
    icm.run(settings(server, testbed, tmp_path / "out", iterations=1))
    content = json.loads(testbed.read_text()) | {field: value}
    testbed.write_text(json.dumps(content))
    with pytest.raises(JournalError, match="content of the testbed"):
        icm.run(settings(server, testbed, tmp_path / "out", iterations=1))


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ("", "/v1/models"),
        ("/", "/v1/models"),
        ("/v1", "/v1/models"),
        ("/api/v1/", "/api/v1/models"),
        ("/v1beta/openai", "/v1beta/openai/models"),
    ],
)
def test_the_path_of_an_address(server, given, asked):
    server.by_name = False
    with Scorer(server.url + given):
        assert server.got[0] == asked


def test_another_model_of_the_same_name_is_another(server, testbed, tmp_path):
    icm.run(settings(server, testbed, tmp_path, iterations=1))
    server.root = "a/b"
    with pytest.raises(JournalError, match="hub name of the model"):
        icm.run(settings(server, testbed, tmp_path, iterations=1))


def test_another_way_of_scoring_is_another_run(server, testbed, tmp_path):
    icm.run(settings(server, testbed, tmp_path, iterations=1))
    server.by_name = False
    with pytest.raises(JournalError, match="scores"):
        icm.run(settings(server, testbed, tmp_path, iterations=1))


def solutions(server) -> list[int]:
    """For how many questions each request of gsm8k asked for solutions."""
    return [len(body["prompt"]) for body in server.bodies if body.get("n")]


def test_what_was_sampled_is_kept_for_the_same_request(server, tmp_path):
    """For others it is sampled again."""
    rows = tmp_path / "rows.json"
    make = [{"question": f"{n} + {n}?", "answer": f"#### {2 * n}"} for n in range(40)]
    rows.write_text(json.dumps(make))
    journal = tmp_path / icm.JOURNAL

    def load(**options) -> testbeds.Testbed:
        options = dict(dataset=str(rows), pool_size=16) | options
        ours = settings(server, "gsm8k", tmp_path, **options)
        with icm.Journal(journal) as opened, icm.connect(ours) as client:
            sample = icm.sample_once(ours, client, opened)
            size = ours.pool_size
            return testbeds.load("gsm8k", ours.dataset, size, ours.seed, sample)

    server.complete = lambda body: {
        "choices": [
            {"index": i, "text": f"#### {i}"} for i in range(4 * len(body["prompt"]))
        ]
    }
    server.by_name = False
    first = load()
    assert load() == first and solutions(server) == [4]
    assert len(load(pool_size=32).examples) == 32
    journal.write_text("of a run")
    load(seed=1)
    rows.write_text(json.dumps(make[::-1]))
    load()
    assert journal.read_text()  # whatever else was asked for in its folder
    load(restart=True)
    assert not journal.read_text()  # it would be of other solutions
    assert solutions(server) == [4, 8, 4, 4, 4]
    load()
    assert solutions(server) == [4, 8, 4, 4, 4]


@pytest.mark.parametrize("restart", [False, True])
def test_how_to_go_on(server, testbed, tmp_path, restart, capsys):
    """A run that threw away its journal goes on without doing so again."""
    command = "the same command without --restart" if restart else "the same command"
    icm.run(settings(server, testbed, tmp_path, iterations=2))
    server.faults = [None] * 6 + ["400"]
    with pytest.raises(SystemExit):
        settings(server, testbed, tmp_path, restart=restart, iterations=9).cli_cmd()
    assert f"{command} goes on" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(SystemExit):
        settings(server, testbed, tmp_path, alpha=3).cli_cmd()
    assert "goes on" not in capsys.readouterr().out  # it does not


def test_an_error_is_shown_as_it_is(server, tmp_path, capsys):
    """With its square brackets, which are no markup."""
    file = tmp_path / "bad.json"
    file.write_text('{"labels": ["a"]}')
    with pytest.raises(SystemExit):
        settings(server, file, tmp_path / "out").cli_cmd()
    assert "[type=too_short" in " ".join(capsys.readouterr().out.split())


def test_an_output_that_is_a_file(server, testbed):
    with pytest.raises(JournalError, match="--output"):
        icm.run(settings(server, testbed, testbed))


def test_cached_tokens(server, testbed, tmp_path):
    """What the answers say and what the prompts were, for each iteration."""
    icm.run(settings(server, testbed, tmp_path, fix_rounds=1))
    server.cached.clear()
    told = [server.complete(body)["usage"] for body in server.bodies]
    # Before: the probe, zero-shot, the first labels. After: true and random ones.
    asked = zip(server.bodies[3:-2], told[3:-2], strict=True)
    usage = [Usage(*row) for row in saved(tmp_path)["usage"] if row[0]]
    for used, (body, said) in zip(usage, asked, strict=True):
        assert used.cached_tokens == said["prompt_tokens_details"]["cached_tokens"]
        assert used.tokens == sum(map(len, body["prompt"]))
        texts = ["".join(map(chr, prompt)) for prompt in body["prompt"]]
        starts = [text.rindex("example") for text in texts]  # of the example itself
        assert used.demonstration_tokens == sum(starts)
        # A text has a label at its end; the token before it is not looked up.
        ends = [(len(text) - 2) // BLOCK * BLOCK for text in texts]
        beyond = [end - start for end, start in zip(ends, starts, strict=True)]
        assert used.cached_beyond == sum(max(0, tokens) for tokens in beyond)


def test_parts_of_a_run():
    """Warm is a run of which half of the demonstrations' slots are labelled."""
    step = icm.Step(0, 0, True, True, 0.0, 0, 0, None)
    examples = [2, 3, 2, 9, 5, 0, 5]  # of which 9 is in no slot
    history = [step._replace(example=n, accepted=n != 5) for n in examples]
    usage = [Usage(calls=10**n) for n in range(7)]
    found = icm.parts(usage, history, seeds=2, slots=8)
    assert {name: part.calls for name, part in found.items()} == {
        "all iterations": 1111111,
        "after warm-up": 1111100,
        "- a new label": 1011000,  # 9, and 5 twice, which was not accepted
        "- another label": 100100,
    }


def test_a_comparison_is_fair(server, testbed, tmp_path, monkeypatch):
    """Each way begins with its own prompts in the cache, and each changes an example
    that no other has changed."""
    changes = []
    of = icm.Prompts.of

    def spy(self, labels, **kwargs):
        changes.append(labels)
        return of(self, labels, **kwargs)

    monkeypatch.setattr(icm.Prompts, "of", spy)
    report = icm.run(settings(server, testbed, tmp_path / "out", compare=2))
    assert [len(times) for times in report["compare"]["seconds"].values()] == [2] * 4
    tried = changes[-16:]
    assert all(labels == tried[0] for labels in tried[::2])
    changed = [set(labels.items()) - set(tried[0].items()) for labels in tried[1::2]]
    assert all(len(one) == 1 for one in changed)
    assert len({slot for ((slot, _),) in changed}) == 8


def test_a_comparison_wants_an_example_for_each_way(server, testbed, tmp_path, capsys):
    ours = settings(server, testbed, tmp_path, iterations=0, seeds=3, compare=1)
    assert icm.run(ours)["compare"] is None
    assert "3 demonstrations" in capsys.readouterr().out


def test_report(server, testbed, tmp_path):
    report = icm.run(settings(server, testbed, tmp_path, compare=1))
    rows = [json.loads(row) for row in (tmp_path / "labels.jsonl").open()]
    truth = {f"example {n}:": "ab"[n % 2] for n in range(16)}
    labelled = [row for row in rows if row["label"]]
    right = sum(row["label"] == truth[row["text"]] for row in labelled)
    assert len(rows) == 16 and len(labelled) == report["labelled"]
    assert report["accuracy"]["ICM"] == right / len(labelled)
    zero_shot = [
        max("ab", key=lambda name: server.logprob(text, name)) == label
        for text, label in truth.items()
    ]
    assert report["accuracy"]["zero-shot"] == np.mean(zero_shot)
    assert report["compare"]["calls"] == {
        "one call": 1,
        "N calls": 16,
        "N calls, 32 at once": 16,
        "N calls, one order, top log-probs": 16,
    }
    assert (tmp_path / "objective.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "report.json").read_text()) == report
