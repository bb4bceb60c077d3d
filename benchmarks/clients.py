# SPDX-License-Identifier: Apache-2.0
"""What people's own clients gain, unmodified, against a server of the release.

    .venv/bin/python benchmarks/clients.py
    .venv/bin/python benchmarks/clients.py --part teacher

`lm-eval`: its `local-completions` model, which sends `echo` and `logprobs`, on a multiple
choice of 16 shots and 4 answers. `conversation`: a text that is scored with openai's
client after each of 20 turns. `teacher`: TRL's `VLLMClient.get_sequence_logprobs` with
its 100 most probable tokens a position, beside a client that asks for one token again and
again. TRL is not installed with the fork: `requirements/trl.lock` has it.

Both servers are started once, with the same options; the clients' answers are compared.
The time is the server's: CPU time of its processes, which on an idle machine is little
less than that on the clock and does not depend on what else runs.
"""

import argparse
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import processes
import psutil
import requests
import runners
from live_server import live_server
from lm_eval_speed import EXAMPLE, with_tokenizer

NAME = "teacher"
BLOCK = 32  # the least on a CPU
OPTIONS = [
    f"--served-model-name={NAME}",
    "--dtype=float32",
    "--enforce-eager",
    "--max-model-len=2048",
    f"--block-size={BLOCK}",
    "--kv-cache-memory-bytes=536870912",
    "--max-logprobs=100",
    "--seed=0",
]
TOLERANCE = 1e-4  # nats a token, as in the tests


class Server:
    """A running server and the CPU time of its processes."""

    def __init__(self, process, port: int):
        self.process = psutil.Process(process.pid)
        self.url = f"http://127.0.0.1:{port}"

    def seconds(self) -> float:
        times = [
            process.cpu_times()
            for process in [self.process, *self.process.children(recursive=True)]
        ]
        return sum(time.user + time.system for time in times)

    def forget(self) -> None:
        requests.post(f"{self.url}/reset_prefix_cache", timeout=60).raise_for_status()

    def time(self, function):
        """What a function of a server returns, and the server's seconds for it."""
        begin = self.seconds()
        return function(self), self.seconds() - begin


@contextmanager
def both_servers(model: Path, options: list[str]) -> Iterator[dict[str, Server]]:
    """Servers of the release and of the fork, by name, with the same options."""
    servers = {}
    with ExitStack() as stack:
        for name in ("release", "fork"):
            paths = [processes.upstream_folder()] if name == "release" else []
            environ = {
                "PYTHONPATH": runners.environment("v1", paths)["PYTHONPATH"],
                "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
            }
            log = processes.RESULTS / f"clients_{name}.log"
            log.parent.mkdir(parents=True, exist_ok=True)
            server = live_server(model, options, "v1", log, environ)
            servers[name] = Server(*stack.enter_context(server))
        yield servers


def main() -> None:
    args = parse_args()
    for part in args.part:
        measure(part, args)


def measure(part: str, args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        # A teacher's many tokens are to weigh more than the product of its head.
        shape = (32_000, 512, 4) if part == "teacher" else (128_256, 1024, 2)
        model = with_tokenizer(processes.random_llama(*shape, "float32"), Path(folder))
        with both_servers(model, OPTIONS) as servers:
            PARTS[part](servers, model, args)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--part", nargs="+", default=["lm-eval", "conversation"],
                        choices=["lm-eval", "conversation", "teacher"])  # fmt: skip
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--questions", type=int, default=4)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--plot", type=Path, metavar="FILE.png")
    args = parser.parse_args()
    for name, least in (("repeat", 1), ("questions", 1), ("turns", 5)):
        if getattr(args, name) < least:
            parser.error(f"--{name} has to be at least {least}")
    return args


def by_turns(servers: dict[str, Server], function, repeat: int):
    """Answers, and seconds a round, of each server; one round before that to warm up."""
    answers, seconds = {}, {name: [] for name in servers}
    for _ in range(repeat + 1):
        for name, server in servers.items():
            server.forget()
            answers[name], taken = server.time(function)
            seconds[name].append(taken)
    return answers, {name: times[1:] for name, times in seconds.items()}


def row(what: str, seconds: dict[str, list[float]], difference: float) -> list[str]:
    ratios = [x / y for x, y in zip(seconds["release"], seconds["fork"])]
    return [
        what,
        f"{statistics.median(seconds['release']):.2f}",
        f"{statistics.median(seconds['fork']):.2f}",
        f"{statistics.median(ratios):.1f} ({min(ratios):.1f} to {max(ratios):.1f})",
        f"{difference:.1e}",
    ]


COLUMNS = ["what", "release, s", "fork, s", "times faster", "greatest |Δ|, nats"]


def measure_lm_eval(servers, model: Path, args) -> None:
    import lm_eval
    from lm_eval.tasks import TaskManager

    tasks = TaskManager(include_path=str(EXAMPLE / "tasks"))
    rows = []
    for case, task in (
        ("own shots", "held_out_next_line"),
        ("same shots", "held_out_next_line_same_shots"),
    ):

        def evaluate(server: Server) -> list[tuple[float, bool]]:
            results = lm_eval.simple_evaluate(
                model="local-completions",
                model_args=dict(
                    model=NAME,
                    base_url=f"{server.url}/v1/completions",
                    tokenizer=str(model),
                    tokenizer_backend="huggingface",
                    num_concurrent=1,
                    max_length=1024,
                ),
                tasks=[task],
                task_manager=tasks,
                limit=args.questions,
                bootstrap_iters=0,
                verbosity="ERROR",
            )
            return [
                (float(score), str(greedy) == "True")
                for sample in results["samples"][task]
                for ((score, greedy),) in sample["resps"]
            ]

        answers, seconds = by_turns(servers, evaluate, args.repeat)
        theirs, ours = answers["release"], answers["fork"]
        assert len(theirs) == len(ours) == 4 * args.questions
        assert [greedy for _, greedy in theirs] == [greedy for _, greedy in ours]
        gap = max(abs(x - y) for (x, _), (y, _) in zip(theirs, ours))
        assert gap < 30 * TOLERANCE
        rows.append(row(f"lm-eval local-completions, {case}", seconds, gap))
    title = "lm-eval's own local-completions, 16 shots, 4 answers"
    processes.show("clients_lm_eval", title, COLUMNS, rows)


def measure_conversation(servers, model: Path, args) -> None:
    from openai import OpenAI

    rng = np.random.default_rng(0)
    turns = [rng.integers(1000, 120_000, 64).tolist() for _ in range(args.turns)]

    def converse(server: Server) -> tuple[list[float], list[list[float]]]:
        """Seconds of each turn, and the log-probabilities of its answer."""
        client = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        seconds, values, ids = [], [], []
        for turn in turns:
            ids = ids + turn
            begin = server.seconds()
            answer = client.completions.create(
                model=NAME, prompt=ids, echo=True, logprobs=1, max_tokens=1
            )
            seconds.append(server.seconds() - begin)
            values.append(answer.choices[0].logprobs.token_logprobs[1 : len(ids)])
            assert len(values[-1]) == len(ids) - 1
        return seconds, values

    answers, seconds = by_turns(servers, converse, args.repeat)
    gap = max(
        float(np.abs(np.subtract(x, y)).max())
        for x, y in zip(answers["release"][1], answers["fork"][1])
    )
    assert gap < TOLERANCE
    rows = [row(f"{args.turns} turns of 64 tokens", seconds, gap)]
    each = {name: answers[name][0] for name in servers}
    for first, last in ((0, 5), (args.turns - 5, args.turns)):
        part = {name: [sum(times[first:last])] for name, times in each.items()}
        rows.append(row(f"turns {first + 1} to {last}", part, gap))
    title = "A conversation that is scored after each turn: echo, logprobs=1"
    processes.show("clients_conversation", title, COLUMNS, rows, seconds=each)
    if args.plot:
        plot(each, args.plot)


def plot(each: dict[str, list[float]], path: Path) -> None:
    """The sum of the seconds up to each turn."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.4), layout="constrained")
    for name, seconds in each.items():
        turns = range(1, len(seconds) + 1)
        axes.plot(turns, np.cumsum(seconds), marker=".", label=name)
    axes.set(xlabel="turn, 64 tokens each", ylabel="seconds of the server, in all")
    axes.set_title("A conversation that is scored after each turn")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=160)


def measure_teacher(servers, model: Path, args) -> None:
    from trl.generation.vllm_client import VLLMClient

    rng = np.random.default_rng(1)
    rows = []
    for batch, length in ((1, 512), (8, 256)):
        sequences = rng.integers(0, 4096, (batch, length)).tolist()
        waits: dict[str, list[float]] = {name: [] for name in servers}

        def teach(server: Server) -> dict:
            client = VLLMClient(base_url=server.url, connection_timeout=60)
            name = next(key for key, value in servers.items() if value is server)
            waits[name].append(0.0)
            done = threading.Event()

            def ask() -> None:
                body = {"model": NAME, "prompt": [1], "max_tokens": 1}
                while not done.is_set():
                    begin = time.perf_counter()
                    requests.post(
                        f"{server.url}/v1/completions", json=body, timeout=600
                    )
                    waits[name][-1] = max(waits[name][-1], time.perf_counter() - begin)
                    done.wait(0.02)

            thread = threading.Thread(target=ask)
            thread.start()
            try:
                return client.get_sequence_logprobs(sequences, [1] * batch)
            finally:
                done.set()
                thread.join()

        answers, seconds = by_turns(servers, teach, args.repeat)
        gap = 0.0
        for key in ("logprobs", "actual_logprobs"):
            theirs, ours = (np.array(answers[name][key]) for name in servers)
            # The actual token is -inf if it is not among the first 100.
            assert (np.isinf(theirs) == np.isinf(ours)).all()
            found = np.isfinite(theirs)
            gap = max(gap, float(np.abs(ours[found] - theirs[found]).max()))
        assert gap < TOLERANCE
        slowest = {name: statistics.median(times[1:]) for name, times in waits.items()}
        rows.append(
            [
                *row(f"{batch} x {length} tokens", seconds, gap),
                f"{slowest['release']:.2f}",
                f"{slowest['fork']:.2f}",
            ]
        )
    columns = [*COLUMNS, "another request waits, release", "fork, s"]
    title = "TRL's get_sequence_logprobs, 100 tokens a position"
    processes.show("clients_teacher", title, columns, rows)


PARTS = {
    "lm-eval": measure_lm_eval,
    "conversation": measure_conversation,
    "teacher": measure_teacher,
}

if __name__ == "__main__":
    main()
