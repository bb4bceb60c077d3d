# SPDX-License-Identifier: Apache-2.0
"""`examples/applications/ace` without a model: rounds, the journal, going on, and who is
asked."""

import json
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import runners
from ace_runs import (
    HELLO,
    SAMPLES,
    command,
    journal,
    playbook,
    samples,  # noqa: F401
    says,
    server,  # noqa: F401
    settings,
    whole,  # noqa: F401
)

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path[:0] = [str(EXAMPLES / "applications"), str(EXAMPLES)]

from ace import ClientError, Completion, LLMClient, Playbook, Sampling, bench, prompts
from ace import __main__ as program
from ace.client import REFERENCE_MODEL, TEMPLATE
from ace.replies import Replies
from common import Journal, JournalError

# The loop


def test_all_samples_of_a_phase_at_once(server, samples, whole):
    """What a run asks, and what it makes of the replies."""
    train = prompts.load_samples(samples)
    train = sum(sample.split == "train" for sample in train)
    counts = Counter((line["round"], line["phase"]) for line in journal(whole))
    assert counts == {
        (0, "generator"): SAMPLES,
        (0, "reflector"): train,
        (0, "curator"): train,
        (1, "generator"): SAMPLES,
        (1, "reflector"): train,
        (1, "curator"): train,
        (2, "generator"): SAMPLES,
    }
    report = json.loads((whole / "report.json").read_text())
    rounds = report["rounds"]
    assert [len(r["playbook"]["bullets"]) for r in rounds] == [0, train, train]
    assert [r["reflections"] for r in rounds] == [train, train, 0]
    assert [r["operations"] for r in rounds] == [train, 0, 0]
    assert [r["without_effect"] for r in rounds] == [0, train, 0]
    # b1 is tagged by all reflections of the second round: it was not there before.
    assert rounds[2]["playbook"]["bullets"][0]["helpful"] == train
    best = max(rounds, key=lambda r: r["accuracy"]["validation"])
    assert report["best"] == best["number"]
    assert Playbook.load(whole / "playbook.json").model_dump() == best["playbook"]
    for entry in rounds:
        assert entry["accuracy"] == accuracy(samples, whole, entry["number"])


def accuracy(samples: Path, output: Path, number: int) -> dict[str, float]:
    """Of a round, from the journal and the definition."""
    rows = json.loads(samples.read_text())
    right: dict[str, list[bool]] = {}
    for line in journal(output):
        if (line["round"], line["phase"]) == (number, "generator"):
            row = rows[line["index"]]
            said = line["text"].rpartition("Answer: ")[2] == row["answer"]
            right.setdefault(row["split"], []).append(said)
    return {split: sum(values) / len(values) for split, values in right.items()}


def test_early_stopping(server, samples, tmp_path):
    """A playbook that is no better is changed `stop_after` times and no more."""

    def never_better(messages):
        if messages[0]["content"].startswith("Answer"):
            return "Answer: int"
        return says(messages)

    server.says = never_better
    options = {"rounds": 9, "stop_after": 2}
    report = program.run(settings(server, samples, tmp_path, **options))
    assert report.stopped_early and [r.number for r in report.rounds] == [0, 1, 2]
    assert report.best == 0 and not Playbook.load(tmp_path / "playbook.json").bullets


def test_replies_that_are_no_json(server, samples, tmp_path):
    """Are counted and change nothing."""
    server.says = lambda messages: "I do not know."
    report = program.run(settings(server, samples, tmp_path, prefill=False, rounds=1))
    assert report.rounds[0].unreadable == SAMPLES
    assert report.rounds[0].malformed == 8 and not report.rounds[1].playbook.bullets


@pytest.mark.parametrize("stop", [1, 10, 15, 24, 40])
def test_an_interrupted_run_goes_on_as_if_it_had_not_been(
    server, samples, whole, tmp_path, stop, monkeypatch, capsys
):
    """Ctrl-C in the middle of any phase: what was said is not asked for again."""
    output = tmp_path / "parts"
    append = Replies.append

    def interrupt(self, *args):
        reply = append(self, *args)
        if len(self) == stop:
            raise KeyboardInterrupt
        return reply

    arguments = command(server.url, samples, output, "--rounds=2", "--stop-after=0")
    arguments.append("--concurrency=1")
    with monkeypatch.context() as patch:
        patch.setattr(Replies, "append", interrupt)
        with pytest.raises(SystemExit) as error:
            program.main(arguments)
    assert error.value.code == 130 and len(journal(output)) == stop
    assert "interrupted. Nothing is lost" in capsys.readouterr().err
    # A request that was under way may yet be answered, and is not of the second run.
    server.key = "of the second run"
    server.bodies.clear()
    program.main([*arguments, f"--api-key={server.key}"])
    assert journal(output) == journal(whole)
    assert playbook(output) == playbook(whole)
    assert len(server.bodies) == len(journal(whole)) - stop


def test_ctrl_c(server, samples, whole, tmp_path):
    """The signal, to the program as it is run."""
    server.hold_after = 16
    output = tmp_path / "parts"
    arguments = command(server.url, samples, output, "--rounds=2", "--stop-after=0")
    program_and_arguments = [sys.executable, str(EXAMPLES / "applications" / "ace")]
    program_and_arguments += [*arguments, "--concurrency=2"]

    def start() -> subprocess.Popen:
        # What was started in the background ignores Ctrl-C, and so would its children.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        process = subprocess.Popen(
            program_and_arguments,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=runners.environment("v1"),
        )
        signal.signal(signal.SIGINT, before)
        return process

    process = start()
    assert server.holding.wait(60)
    process.send_signal(signal.SIGINT)
    shown, _ = process.communicate(timeout=60)
    assert process.returncode == 130 and "Nothing is lost" in shown
    (line,) = [line for line in shown.splitlines() if "interrupted" in line]
    assert "the same command goes on" in line and "Traceback" not in shown
    kept = journal(output)
    # All but what had been answered and not been read yet.
    assert 12 <= len(kept) <= 16 < len(journal(whole))
    server.hold_after = None
    server.go.set()
    process = start()
    shown, _ = process.communicate(timeout=120)
    assert process.returncode == 0, shown
    assert f"{len(kept)} completions are in" in shown
    assert journal(output) == journal(whole)
    assert playbook(output) == playbook(whole)


def test_more_rounds(server, samples, whole):
    """A run that is done goes on where it ended."""
    before = journal(whole)
    report = program.run(settings(server, samples, whole, rounds=3))
    assert report.kept == len(before) and report.asked == len(server.bodies) > 0
    assert [r.number for r in report.rounds] == [0, 1, 2, 3]
    assert [line for line in journal(whole) if line in before] == before


def test_a_line_that_was_cut(server, samples, whole):
    path = whole / "journal.jsonl"
    content = path.read_bytes()
    expected = journal(whole)
    path.write_bytes(content[:-5])
    program.run(settings(server, samples, whole))
    assert journal(whole) == expected and len(server.bodies) == 1


def test_another_run(server, samples, whole):
    with pytest.raises(JournalError, match="differs in lessons, sampling"):
        program.run(settings(server, samples, whole, lessons=2, temperature=1))
    report = program.run(settings(server, samples, whole, lessons=2, restart=True))
    assert report.kept == 0


def test_another_model(server, samples, tmp_path):
    """Two servers' only models are two runs, whatever name they are served by."""
    server.root = "a/b"
    program.run(settings(server, samples, tmp_path, rounds=0))
    server.root = "a/c"
    with pytest.raises(JournalError, match="differs in model"):
        program.run(settings(server, samples, tmp_path, rounds=0))
    server.root, server.owner = None, "someone"
    with pytest.raises(JournalError, match="differs in model"):
        program.run(settings(server, samples, tmp_path, rounds=0, prefill=False))


def test_who_is_asked(server, tmp_path, monkeypatch):
    """Is the served name, or what vLLM's server tells; a folder by its whole path."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    for root, model in ((None, "m"), ("a/b", "a/b"), ("model", f"{tmp_path}/model")):
        server.root = root
        with LLMClient("openai", base_url=server.url) as client:
            assert client.identity == {"model": model, "chat_template": None}
            assert client.model == "m"


def test_another_chat_template(tmp_path):
    """Is another run; where a server has it and does not tell it is not."""
    path = tmp_path / "journal.jsonl"
    for first, second in (("a", None), ("a", "a"), (None, "a")):
        path.unlink(missing_ok=True)
        for template in (first, second):
            with Journal(path) as journal:
                Replies(journal, {"model": "m", "chat_template": template})
    path.unlink()
    with Journal(path) as journal:
        Replies(journal, {"model": "m", "chat_template": "a"})
        with pytest.raises(JournalError, match="differs in chat_template"):
            Replies(journal, {"model": "m", "chat_template": "b"})
    path.write_text('{"model": null}\n')  # as it once was
    with Journal(path) as journal, pytest.raises(JournalError, match="chat_template"):
        Replies(journal, {"model": "m", "chat_template": None})


def test_restart_waits_for_the_server(server, samples, whole, capsys):
    """What was said is thrown away only when there is a model to say it again."""
    expected = journal(whole)
    arguments = ["--rounds=2", "--stop-after=0", "--patience=0", "--restart"]
    with pytest.raises(SystemExit):
        program.main(command("http://127.0.0.1:9", samples, whole, *arguments))
    shown = " ".join(capsys.readouterr().out.split())
    assert "the same command without --restart goes on" in shown
    assert journal(whole) == expected


def test_a_restart_that_is_stopped(server, samples, whole, capsys):
    """Goes on without the option, as is said."""
    arguments = command(server.url, samples, whole, "--rounds=2", "--stop-after=0")
    arguments.append("--concurrency=1")
    expected = journal(whole)
    server.faults = [None] * 5 + ["400"]
    with pytest.raises(SystemExit):
        program.main([*arguments, "--restart"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "the same command without --restart goes on" in shown
    kept = len(journal(whole))
    assert kept >= 5
    server.bodies.clear()
    program.main(arguments)
    assert journal(whole) == expected and len(server.bodies) == len(expected) - kept


def test_two_runs_in_one_folder(server, samples, whole):
    with (
        Journal(whole / "journal.jsonl"),
        pytest.raises(JournalError, match="Another run uses"),
    ):
        program.run(settings(server, samples, whole))


@pytest.mark.parametrize(
    "content",
    [
        "no json\n",
        "5\n",
        "null\n",
        '{"a": 1}\n[]\n',
        '{"a": 1}\n{}\n{"rou',
        '{"b": 1}\n{"rou',
        '{"b": 1}',
        "no line",
        '{"a": 1} ',
    ],
)
def test_no_journal(tmp_path, content):
    """A file that is none of ours stays as it is."""
    path = tmp_path / "notes.txt"
    path.write_text(content)
    with Journal(path) as journal, pytest.raises(JournalError, match=str(path)):
        Replies(journal, {"a": 1})
    assert path.read_text() == content


@pytest.mark.parametrize("content", ["", '{"a"', '{"a": 1}', '{"a": 1}\n{"rou'])
def test_a_journal_that_has_just_begun(tmp_path, content):
    path = tmp_path / "journal.jsonl"
    path.write_text(content)
    with Journal(path) as journal:
        Replies(journal, {"a": 1})
    assert path.read_text() == '{"a": 1}\n'


# transformers in this process


BEGUN = [*HELLO, {"role": "assistant", "content": "Well"}]


@pytest.mark.parametrize(
    ("template", "asked", "option"),
    [
        ("{{ raise_exception('No system role') }}", HELLO, "--no-system-role"),
        ("{{ messages[1].content }}", BEGUN, "--no-prefill"),
        ("{% for %}", HELLO, ""),
    ],
)
def test_a_chat_template_that_refuses(tmp_path, template, asked, option):
    """Is an error that names the option that helps."""
    path = tmp_path / "template.jinja"
    path.write_text(template)
    with (
        LLMClient("transformers", chat_template=path) as client,
        pytest.raises(ClientError, match=f"(?s)the chat template: .*{option}"),
    ):
        client.chat([asked], Sampling(max_tokens=1))


def test_a_chat_template_without_a_system_role(tmp_path):
    path = tmp_path / "template.jinja"
    path.write_text(
        "{% if messages[0].role == 'system' %}{{ raise_exception('No system') }}"
        "{% endif %}{{ messages[0].content }}"
    )
    with LLMClient("transformers", chat_template=path, system_role=False) as client:
        [found] = client.chat(
            [[{"role": "system", "content": "import"}, HELLO[1]]],
            Sampling(max_tokens=1),
        )
        tokenizer = client._backend.tokenizer
        assert tokenizer.decode(found.prompt_token_ids) == "import\n\nhello"


def test_a_chat_template_that_is_no_text(tmp_path):
    path = tmp_path / "template.jinja"
    path.write_bytes(b"\xe9")
    with pytest.raises(ClientError, match="--chat-template"):
        LLMClient("transformers", chat_template=path)


def test_a_chat_template_that_begins_with_bos(tmp_path):
    """As the README says, for models that want it; the shipped one does not."""
    path = tmp_path / "template.jinja"
    path.write_text("{{ bos_token }}" + TEMPLATE.read_text())
    prompt = {}
    for template in (TEMPLATE, path):
        with LLMClient("transformers", chat_template=template) as client:
            [found] = client.chat([HELLO], Sampling(max_tokens=1))
            prompt[template] = found.prompt_token_ids
            tokenizer = client._backend.tokenizer
    assert tokenizer("hello").input_ids[0] != tokenizer.bos_token_id
    assert prompt[TEMPLATE][0] != tokenizer.bos_token_id
    assert prompt[path] == [tokenizer.bos_token_id, *prompt[TEMPLATE]]


def test_the_chat_template_is_part_of_who_is_asked(tmp_path):
    path = tmp_path / "template.jinja"
    identities = []
    for template in ("a", "b", "a"):
        path.write_text(template)
        with LLMClient("transformers", chat_template=path) as client:
            identities.append(client.identity)
    assert identities[0] == identities[2] != identities[1]
    assert identities[0]["model"] == identities[1]["model"] == str(REFERENCE_MODEL)


def test_a_model_without_a_longest_context(tmp_path):
    """Whose positions are not numbered has no `max_position_embeddings`."""
    from transformers import AutoTokenizer, BloomConfig, BloomForCausalLM

    config = BloomConfig(vocab_size=4096, hidden_size=16, n_layer=1, n_head=2)
    assert not hasattr(config, "max_position_embeddings")
    BloomForCausalLM(config).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(REFERENCE_MODEL).save_pretrained(tmp_path)
    with LLMClient("transformers", str(tmp_path)) as client:
        [found] = client.chat([HELLO], Sampling(max_tokens=2))
    assert found.token_ids


def test_a_models_own_penalties_do_not_count(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(REFERENCE_MODEL)
    AutoTokenizer.from_pretrained(REFERENCE_MODEL).save_pretrained(tmp_path)
    found = []
    for penalty in (1.0, 5.0):
        model.generation_config.repetition_penalty = penalty
        model.save_pretrained(tmp_path)
        assert json.loads((tmp_path / "generation_config.json").read_text())
        with LLMClient("transformers", str(tmp_path)) as client:
            [completion] = client.chat([HELLO], Sampling(max_tokens=24))
            found.append(completion.token_ids)
    assert len(set(found[0])) < len(found[0])  # some are repeated
    assert found[0] == found[1]


# The benchmark


def completion(ids: list[int], gaps: list[float]) -> Completion:
    top = [{token: -1.0, -1: -1.0 - gap} for token, gap in zip(ids, gaps, strict=True)]
    return Completion("", "length", [], ids, top)


def test_where_greedy_outputs_part():
    ours = [
        completion([1, 2, 3], [1, 1, 1]),
        completion([1, 2, 3], [1, 1e-5, 1]),
        completion([1, 2], [1, 1]),
    ]
    theirs = [
        completion([1, 2, 3], [1, 1, 1]),
        completion([1, 4, 3], [1, 2e-5, 1]),
        completion([1, 2, 3], [1, 1, 0.5]),
    ]
    none = {"reflector": [], "curator": []}
    tie, other = bench.compare({"generator": ours} | none, {"generator": theirs} | none)
    assert (tie.index, tie.position, tie.ours, tie.theirs) == (1, 1, 2, 4)
    assert tie.our_gap == pytest.approx(1e-5) and tie.is_tie
    assert (other.index, other.position, other.ours, other.theirs) == (2, 2, None, 3)
    assert other.our_gap is None and not other.is_tie
