# SPDX-License-Identifier: Apache-2.0
"""`examples/applications/ace` from end to end with the reference model: vLLM in this
process, a live `vllm serve` on the loopback and transformers, all in float32. The server
is killed and started again in the middle of a run.

Nothing here depends on the model runner; V1 is used.
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path

import forks
import pytest
import runners
from waiting import until

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path[:0] = [str(EXAMPLES / "applications"), str(EXAMPLES)]

from ace import ClientError, LLMClient, Playbook, Sampling
from ace import __main__ as program
from ace import bench, prompts
from ace.client import REFERENCE_MODEL, TEMPLATE
from ace.loop import PHASES
from ace.playbook import Add
from ace.settings import BenchSettings, RunSettings
from dual_vllm.launch import LocalServer

SERVE = [
    "--dtype=float32",
    "--enforce-eager",
    "--max-num-seqs=64",
    "--kv-cache-memory-bytes=268435456",
    "--served-model-name=reference",
    f"--chat-template={TEMPLATE}",
]
SMALL = {"kv_cache_memory_bytes": 2**28}
SCORE_ERROR = 4e-4
"""Nats between two float32 log-probabilities of the reference model: twice
`test_icm_live.SCORE_ERROR`, as either may be off."""
WAIT_SECONDS = 600
"""Far more than anything takes; a machine may have other work."""
SAMPLES = 3
TRAIN, VALIDATION = 20, 10
# Completions of one round and the answers after it, at most.
TOTAL = 2 * (TRAIN + VALIDATION) + 2 * TRAIN
HELLO = [{"role": "user", "content": "import numpy as"}]
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}


class Server(LocalServer):
    """As the program's own, but a fork of a process that has imported vLLM."""

    def start(self, env: dict[str, str]) -> None:
        options = self._command[self._command.index("serve") :]
        self.process = forks.Process(["vllm", *options], env, self.log)


@pytest.fixture(scope="module")
def starting(tmp_path_factory):
    """The server; others load models while it does."""
    server = Server(
        str(REFERENCE_MODEL), tmp_path_factory.mktemp("serve") / "log", SERVE
    )
    server.start(runners.environment("v1"))
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="module")
def server(starting):
    starting.wait()
    return starting


@pytest.fixture(scope="module")
def clients(starting, process_groups):
    """By name; vLLM's engine runs inside this process."""
    options = {"enforce_eager": True, **SMALL}
    with (
        LLMClient("vllm", engine=options) as vllm,
        LLMClient("vllm", engine=options | {"speculative_config": NGRAM}) as ngram,
        LLMClient("transformers") as one,
        LLMClient("transformers", batch_size=4) as four,
        ExitStack() as stack,
    ):
        starting.wait()
        openai = stack.enter_context(LLMClient("openai", base_url=starting.url))
        yield {
            "vllm": vllm,
            "openai": openai,
            "vllm, ngram": ngram,
            "transformers": one,
            "transformers, 4 at once": four,
        }


def settings(kind=BenchSettings, **options):
    return kind(generator_tokens=12, reflector_tokens=24, curator_tokens=24, **options)


@pytest.fixture(scope="module")
def work(clients, tmp_path_factory):
    """Prompts of all phases, with a playbook in them and beginnings of answers; and one
    without."""
    playbook = Playbook()
    playbook.apply([Add(type="ADD", content="A name with num or size is an int.")])
    path = tmp_path_factory.mktemp("work") / "playbook.json"
    playbook.save(path)
    options = settings(playbook=path)
    samples = prompts.load_samples(prompts.SHIPPED)[:SAMPLES]
    work, _ = bench.make_work(clients["vllm"], samples, options, options.sampling())
    assert "num or size" in work["curator"][0][1]["content"]
    work["generator"].append(prompts.generator(samples[0], playbook, prefill=False))
    return work


@pytest.fixture(scope="module")
def outputs(clients, work):
    """Greedy ones of all clients, with the two likeliest tokens."""
    sampling = settings().sampling()
    return {name: bench.top_two(c, work, sampling) for name, c in clients.items()}


NAMES = ["openai", "vllm, ngram", "transformers", "transformers, 4 at once"]


def test_all_see_the_same_token_ids(outputs, work):
    tokenizer = REFERENCE_MODEL / "tokenizer.json"
    from tokenizers import Tokenizer

    encode = Tokenizer.from_file(str(tokenizer)).encode
    for phase in PHASES:
        for index, conversation in enumerate(work[phase]):
            # By hand, from the template's definition.
            *messages, last = conversation
            text = "".join(f"# {m['role']}\n{m['content']}\n\n" for m in messages)
            text += f"# {last['role']}\n{last['content']}"
            if last["role"] != "assistant":
                text += "\n\n# assistant\n"
            expected = encode(text, add_special_tokens=False).ids
            for name, found in outputs.items():
                assert found[phase][index].prompt_token_ids == expected, name


@pytest.mark.parametrize("name", NAMES)
def test_greedy_outputs_are_the_same_up_to_ties(outputs, name):
    ours, theirs = outputs["vllm"], outputs[name]
    differences = bench.compare(ours, theirs)
    assert all(difference.is_tie for difference in differences)
    total = sum(len(found) for found in ours.values())
    assert total == 3 * SAMPLES + 1 and len(differences) < total / 5
    for phase in PHASES:
        for a, b in zip(ours[phase], theirs[phase], strict=True):
            end = bench.first_difference(a.token_ids, b.token_ids)
            if end is None:
                assert (a.text, a.finish_reason) == (b.text, b.finish_reason)
            for mine, other in zip(a.top[:end], b.top[:end], strict=True):
                for token in mine.keys() & other.keys():
                    assert mine[token] == pytest.approx(other[token], abs=SCORE_ERROR)


def test_all_know_which_model_they_ask(clients):
    """So a run may go on with another one; the server does not tell its template."""
    identities = {name: client.identity for name, client in clients.items()}
    openai = identities.pop("openai")
    assert openai == {"model": str(REFERENCE_MODEL), "chat_template": None}
    template = hashlib.sha256(TEMPLATE.read_bytes()).hexdigest()
    for identity in identities.values():
        assert identity == openai | {"chat_template": template}


def test_ngram_is_on(clients):
    config = clients["vllm, ngram"].engine.llm_engine.vllm_config.speculative_config
    assert config.method == "ngram" and config.num_speculative_tokens == 3
    assert clients["vllm"].engine.llm_engine.vllm_config.speculative_config is None


def test_a_stop_string_ends_a_text(clients, outputs, work):
    """Where it begins, for all in the same way."""
    found = outputs["vllm"]["reflector"]
    texts = [completion.text for completion in found]
    stop = next(text[5:7] for text in texts if text.find(text[5:7]) == 5)
    sampling = Sampling(max_tokens=24, stop=(stop,))
    for name, client in clients.items():
        completions = client.chat(work["reflector"], sampling)
        for index, completion in enumerate(completions):
            whole = outputs[name]["reflector"][index].text
            assert completion.text == whole.split(stop)[0], name
            ended = stop in whole or found[index].finish_reason == "stop"
            assert completion.finish_reason == ("stop" if ended else "length"), name


def test_sampling(clients, outputs, work):
    """At a high temperature texts differ, and a seed repeats them; with one token to
    choose from they are the greedy ones."""
    asked = work["generator"][:2]
    hot = Sampling(max_tokens=12, temperature=2.0, seed=7)
    for name, client in clients.items():
        if name == "vllm, ngram":  # stops at top_k on a CPU, see the README's limits
            continue
        greedy = [c.text for c in outputs[name]["generator"][:2]]
        drawn = [[c.text for c in client.chat(asked, hot)] for _ in range(2)]
        assert drawn[0] == drawn[1] != greedy, name
        one = Sampling(max_tokens=12, temperature=1.0, top_k=1)
        assert [c.text for c in client.chat(asked, one)] == greedy, name


@pytest.mark.parametrize("name", ["vllm", *NAMES])
def test_what_does_not_fit_is_refused(clients, name):
    long = [{"role": "user", "content": "import numpy as np\n" * 400}]
    with pytest.raises(ClientError, match="1024|fit its context"):
        clients[name].chat([HELLO, long], Sampling(max_tokens=4))
    [found] = clients[name].chat([HELLO], Sampling(max_tokens=4))  # goes on serving
    assert len(found.token_ids) == 4 or found.finish_reason == "stop"


@pytest.mark.parametrize("provider", ["vllm", "transformers"])
def test_no_such_model(provider, tmp_path, process_groups):
    with pytest.raises(ClientError, match="cannot load"):
        LLMClient(provider, str(tmp_path))
    with pytest.raises(ClientError, match="--chat-template"):
        LLMClient(provider, chat_template=tmp_path / "nowhere")


def test_giving_up_in_the_middle(clients, work):
    """What is left is not computed, and the client can be used again."""
    for name, client in clients.items():
        left = client.complete(work["generator"], Sampling(max_tokens=12))
        index, first = next(left)
        left.close()
        again = client.chat(work["generator"], Sampling(max_tokens=12))
        assert again[index].text == first.text, name


# The program


def command(server, output: Path, *options: str) -> list[str]:
    limits = ["--generator-tokens=12", "--reflector-tokens=24", "--curator-tokens=24"]
    samples = output.with_name("samples.json")
    shipped = json.loads(prompts.SHIPPED.read_text())
    few = [x for x in shipped if x["split"] == "train"][:TRAIN]
    few += [x for x in shipped if x["split"] == "validation"][:VALIDATION]
    samples.write_text(json.dumps(few))
    options = (f"--output={output}", f"--samples={samples}", *options)
    options = ("--rounds=1", *limits, *options)
    if server:
        options += ("--provider=openai", f"--base-url={server.url}")
    return [sys.executable, str(EXAMPLES / "applications" / "ace"), "run", *options]


class Command:
    """`python examples/applications/ace run` as a process."""

    def __init__(self, server, output: Path, *options: str):
        self.output = output
        self.log = output.with_suffix(".log")
        # What was started in the background ignores Ctrl-C, and so would its children.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        environ = runners.environment("v1")
        environ.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
        with self.log.open("a") as stream:
            self.process = subprocess.Popen(
                command(server, output, *options),
                stdout=stream,
                stderr=stream,
                env=environ,
                start_new_session=True,
            )
        signal.signal(signal.SIGINT, before)

    def wait_for(self, count: int) -> None:
        """Until so many completions are in the journal."""
        path = self.output / program.JOURNAL

        def are_there() -> bool:
            assert self.process.poll() is None, self.log.read_text()
            return path.exists() and path.read_bytes().count(b"\n") > count

        until(are_there, WAIT_SECONDS, self.log.read_text)

    def wait(self) -> str:
        """What it printed."""
        try:
            status = self.process.wait(WAIT_SECONDS)
        finally:
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)
        self.status = status
        return self.log.read_text()


def journal(output: Path) -> dict[tuple, str]:
    """What was said; each place is there once."""
    _, *lines = map(json.loads, (output / program.JOURNAL).read_text().splitlines())
    found = {(x["round"], x["phase"], x["index"]): x["text"] for x in lines}
    assert len(found) == len(lines)
    return found


@pytest.fixture(scope="module")
def whole(server, tmp_path_factory) -> dict[tuple, str]:
    """What is said in a run over HTTP that nothing disturbs."""
    output = tmp_path_factory.mktemp("whole") / "out"
    run = Command(server, output)
    shown = run.wait()
    assert run.status == 0, shown
    found = journal(output)
    assert f"{len(found)} completions," in shown and "0 retries" in shown
    report = json.loads((output / program.REPORT).read_text())
    # The model knows something of the shipped samples. Of two answers, chance has half right.
    first = report["rounds"][0]
    right = TRAIN * first["accuracy"]["train"] + VALIDATION * first["accuracy"]["validation"]
    answered = TRAIN + VALIDATION - first["unreadable"]
    assert answered > 10 and right > 0.75 * answered
    assert report["rounds"][1]["playbook"]["bullets"]
    # Reflections without a lesson need no curator.
    assert TOTAL - TRAIN < len(found) <= TOTAL
    return found


def same(ours: dict[tuple, str], theirs: dict[tuple, str]) -> bool:
    """Equal but for numeric ties, which may turn what comes after them as well; none is
    known of the answers of the first round."""
    first = {k: v for k, v in ours.items() if k[:2] == (0, "generator")}
    assert first == {k: theirs[k] for k in first}
    return sum(ours[k] == theirs.get(k) for k in ours) > 0.9 * len(ours)


def test_a_server_that_is_killed_in_the_middle(server, whole, tmp_path):
    """Waited for until it is there again; nothing is lost, nothing done twice."""
    run = Command(server, tmp_path / "out", "--concurrency=8")
    run.wait_for(40)
    server.kill()
    before = journal(tmp_path / "out")
    server.start(runners.environment("v1"))
    shown = run.wait()
    assert run.status == 0, shown
    assert 40 <= len(before) < len(whole) and " 0 retries" not in shown
    found = journal(tmp_path / "out")
    assert len(found) == len(whole) and same(found, whole)
    assert before.items() <= found.items()


def test_ctrl_c_with_vllm_in_the_process(server, whole, tmp_path):
    """In the middle of a batch; what was said is kept, and another provider goes on."""
    run = Command(None, tmp_path / "out")
    run.wait_for(VALIDATION + TRAIN + 5)
    os.killpg(run.process.pid, signal.SIGINT)  # as a terminal does: to the engine too
    shown = run.wait()
    assert run.status == 130, shown
    assert "Nothing is lost" in shown
    kept = journal(tmp_path / "out")
    assert VALIDATION + TRAIN + 5 <= len(kept) < len(whole)
    run = Command(server, tmp_path / "out")
    shown = run.wait()
    assert run.status == 0, shown
    assert f"{len(whole) - len(kept)} completions," in shown
    found = journal(tmp_path / "out")
    assert len(found) == len(whole) and same(found, whole)
    assert kept.items() <= found.items()


def test_two_clients_at_once(server, clients, outputs, work):
    asked = work["reflector"]
    expected = [completion.text for completion in outputs["openai"]["reflector"]]
    found = []

    def ask() -> None:
        with LLMClient("openai", base_url=server.url) as client:
            for _ in range(3):
                completions = client.chat(asked, Sampling(max_tokens=24))
                found.append([completion.text for completion in completions])

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 6


def test_times_of_a_phase_without_prompts():
    assert bench.ratio([0.5], [0.0]) == ""
    assert bench.ratio([3.0, 1.0], [0.5, 0.5]) == "4.0×"


def test_bench(tmp_path, capsys, process_groups):
    """With speculative decoding beside what there is without."""
    options = settings(
        count=2,
        repeats=1,
        batched=2,
        output=tmp_path / "out",
        engine_args=SMALL,
        speculative_config=NGRAM,
    )
    figures = bench.run(options)
    assert figures["prompts"] == dict.fromkeys(PHASES, 2) and figures["same_prompts"]
    assert all(difference["tie"] for difference in figures["differences"])
    ways = {bench.VLLM, bench.SPECULATIVE, bench.ONE, "transformers, 2 at once"}
    assert set(figures["seconds"]) == ways
    for seconds in figures["seconds"].values():
        for kind in bench.Times._fields:
            total = sum(seconds[phase][kind][0] for phase in PHASES)
            assert seconds["total"][kind] == [pytest.approx(total)] and total > 0
    counts = figures["speculative"]
    for kind in bench.COUNTERS:
        assert counts[kind]["total"] == sum(counts[kind][phase] for phase in PHASES)
    drafted, accepted = counts["drafted"]["total"], counts["accepted"]["total"]
    # Each token that is accepted is one of the text; few texts repeat nothing.
    generated = sum(figures["generated_tokens"].values())
    assert 0 < accepted <= min(drafted, generated)
    assert counts["same_prompts"]
    assert all(difference["tie"] for difference in counts["differences"])
    assert json.loads((tmp_path / "out").read_text()) == figures
    shown = capsys.readouterr().out
    assert "sequential" in shown and "Greedy outputs" in shown
    assert "with speculative decoding" in shown and str(drafted) in shown


def test_the_options_of_the_engine(monkeypatch):
    """Reach vLLM as they are."""
    seen = {}

    def load(provider, model, **options):
        seen.update(options | {"provider": provider, "model": model})
        raise ClientError("enough")

    monkeypatch.setattr("ace.settings.LLMClient", load)
    options = ["--model=a/b", "--max-model-len=512", "--no-enforce-eager"]
    options += [f"--speculative-config={json.dumps(NGRAM)}"]
    options += ['--engine-args={"tensor_parallel_size": 2}']
    settings = RunSettings(_cli_parse_args=options)
    with pytest.raises(ClientError):
        settings.connect()
    assert (seen["provider"], seen["model"]) == ("vllm", "a/b")
    assert seen["engine"] == {
        "enforce_eager": False,
        "max_model_len": 512,
        "speculative_config": NGRAM,
        "tensor_parallel_size": 2,
    }
