# SPDX-License-Identifier: Apache-2.0
"""Tokens a second of two servers together, beside those of one.

Three things are timed by turns, with the same prompts, which both servers have in their
prefix caches, and the same numbers of tokens:

- *plain*: one server samples on its own, in one request;
- *one server*: one server alone is asked what the coordinator asks of each. The two
  work at once, so this is the least time that is possible, given a machine for each;
- *dual*: the coordinator with both servers.

Then the last of these is done again with what the servers answered, while they rest:
*alone*.
"""

import asyncio
import itertools
import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dual_vllm import report
from dual_vllm.config import CoordinatorConfig
from dual_vllm.coordinator import DualVLLMCoordinator
from dual_vllm.replay import record, replay


class Speeds(NamedTuple):
    """Each `[repeats]`."""

    plain: list[float]  # tokens a second
    one_server: list[float]
    dual: list[float]
    overhead: list[float]  # milliseconds of this process's processor time a token
    alone: list[float]  # the same while the servers rest
    rounds: list[float]  # rounds of requests per token of a sample


async def bench(
    config: CoordinatorConfig, text: str, counts: Sequence[int], repeats: int
) -> dict[int, Speeds]:
    """By number of prompts."""
    results = {}
    for count in counts:
        options = {"batch_size": count, "ignore_eos": True, "stop_token_ids": []}
        speeds = Speeds([], [], [], [], [], [])
        for repeat in range(-1, repeats):  # the first one warms up
            seed = {"seed": config.seed + repeat + 1}
            settings = CoordinatorConfig(**config.model_dump() | options | seed)
            dual = DualVLLMCoordinator(settings)
            answers = [record(server) for server in dual.servers]
            async with dual:
                prompts = cut(dual.tokenizer.encode(text), count, repeat)
                tokens = count * settings.max_tokens
                await asyncio.gather(
                    *(server.ask(prompts, None, top_k=1) for server in dual.servers)
                )
                seconds = {
                    "plain": await plain(dual, prompts),
                    "one_server": await one_server(dual, prompts),
                }
                rounds, begin = dual.rounds, time.perf_counter()
                overhead, outputs = await generate(dual, prompts)
                seconds["dual"] = time.perf_counter() - begin
                if repeat >= 0:
                    for name, value in seconds.items():
                        getattr(speeds, name).append(tokens / value)
                    speeds.overhead.append(overhead)
                    speeds.rounds.append((dual.rounds - rounds) / settings.max_tokens)
        with replay(answers) as urls:
            addresses = dict(zip(("url_a", "url_b"), urls))
            settings = CoordinatorConfig(**settings.model_dump() | addresses)
            async with DualVLLMCoordinator(settings) as dual:
                for repeat in range(-1, repeats):
                    overhead, again = await generate(dual, prompts)
                    assert again == outputs
                    if repeat >= 0:
                        speeds.alone.append(overhead)
        results[count] = speeds
    return results


async def generate(
    dual: DualVLLMCoordinator, prompts: list[list[int]]
) -> tuple[float, list[list[int]]]:
    """Milliseconds of this process's processor time a token, and the tokens."""
    begin = time.process_time()
    outputs = await dual.generate_batch(prompts)
    seconds = time.process_time() - begin
    drawn = [output.token_ids for output in outputs]
    return 1000 * seconds / sum(map(len, drawn)), drawn


PROMPT_TOKENS = 64


def cut(ids: list[int], count: int, repeat: int) -> list[list[int]]:
    """Prompts that no other repeat has, so that none is in a prefix cache."""
    starts = itertools.count((repeat + 1) * count * 7, 7)
    return [
        [ids[(start + n) % len(ids)] for n in range(PROMPT_TOKENS)]
        for start, _ in zip(starts, range(count))
    ]


async def plain(dual: DualVLLMCoordinator, prompts: list[list[int]]) -> float:
    """Seconds in which one server samples."""
    client, tokens = dual.servers[0].client, dual.config.max_tokens
    begin = time.perf_counter()
    await client.complete(prompts, max_tokens=tokens, ignore_eos=True, temperature=1)
    return time.perf_counter() - begin


async def one_server(dual: DualVLLMCoordinator, prompts: list[list[int]]) -> float:
    """Seconds in which one server answers what it is asked for as many tokens."""
    server, config = dual.servers[0], dual.config
    rng = np.random.default_rng(config.seed)
    prompts = [[*prompt] for prompt in prompts]
    top_k = min(config.top_k, dual.vocabulary)
    named = min(3 * top_k // 2, config.max_candidates, dual.vocabulary)
    begin = time.perf_counter()
    answers = await server.ask(prompts, None, top_k=top_k)
    for _ in range(config.max_tokens):
        targets = []
        for prompt, answer in zip(prompts, answers):
            prompt.append(int(rng.choice(answer.top.ids)))
            targets.append(rng.integers(dual.vocabulary, size=named).tolist())
        answers = await server.ask(prompts, targets, top_k=top_k)
    return time.perf_counter() - begin


def show(results: dict[int, Speeds]) -> None:
    rows = []
    for count, speeds in results.items():
        dual = statistics.median(speeds.dual)
        half = (max(speeds.dual) - min(speeds.dual)) / 2
        rows.append(
            (
                str(count),
                f"{statistics.median(speeds.plain):.0f}",
                f"{statistics.median(speeds.one_server):.0f}",
                f"{dual:.0f} ±{half:.0f}",
                f"{dual / statistics.median(speeds.plain):.2f}",
                f"{dual / statistics.median(speeds.one_server):.2f}",
                f"{statistics.median(speeds.rounds):.2f}",
                f"{statistics.median(speeds.overhead):.2f} ms",
                f"{statistics.median(speeds.alone):.2f} ms",
            )
        )
    columns = ("prompts", "plain", "one server", "dual", "dual / plain")
    columns += ("dual / one", "rounds a token", "overhead a token", "alone")
    report.table("Tokens a second", columns, rows)
