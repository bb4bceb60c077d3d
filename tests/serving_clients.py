# SPDX-License-Identifier: Apache-2.0
"""Many clients of one server at once, right, wrong and gone."""

import asyncio
import json
import random
from collections import Counter

import aiohttp
from malformed import BAD, LARGE, VALID, assert_names, large, spoil
from scoring import random_ids
from scoring_server import (
    COMPLETIONS,
    GENERATE,
    MAX_LOGPROBS,
    MAX_MODEL_LEN,
    MODEL,
    REQUEST_SECONDS,
    VOCABULARY,
    Server,
    assert_choice,
)
from scoring_texts import TEXTS, assert_continuation, continuation


class Clients:
    """Many clients at once. Some send valid requests and check the answers, most
    send malformed ones, some go away."""

    COUNT = 16
    SHARES = {
        "score_ids": 10,
        "score_batch": 6,
        "score_text": 6,
        "score_continuations": 6,
        "score_by_generate": 6,
        "complete": 4,
        "stream": 4,
        "send_malformed": 56,
        "go_away": 4,
        "go_away_in_the_body": 2,
        "go_away_in_the_stream": 2,
    }

    def __init__(self, server: Server, oracle, seed: int):
        self.server = server
        self.oracle = oracle
        self.rng = random.Random(seed)
        lengths = [2, 3, 5, 17, 40, 63, 64, 65, 100, 130, 200, 250]
        self.prompts = [random_ids(n, VOCABULARY, n) for n in lengths]
        self.texts = [
            server.ask(**self.ordinary(prompt))["choices"][0]["text"]
            for prompt in self.prompts
        ]
        self.done: Counter[str] = Counter()
        self.statuses: Counter[int] = Counter()
        self.wrong: list[str] = []

    async def run(self, count: int) -> None:
        """Sends `count` requests, `COUNT` at a time."""
        shares = self.SHARES
        kinds = self.rng.choices([*shares], [*shares.values()], k=count)
        # Ten MiB keep the server busy for seconds, so they are few.
        for number in self.rng.sample(range(count), max(count // 200, 1)):
            kinds[number] = "send_large"
        queue = iter(enumerate(kinds))
        timeout = aiohttp.ClientTimeout(REQUEST_SECONDS)
        async with aiohttp.ClientSession(self.server.url, timeout=timeout) as session:
            async with asyncio.TaskGroup() as group:
                for _ in range(self.COUNT):
                    group.create_task(self.client(session, queue))

    async def client(self, session: aiohttp.ClientSession, queue) -> None:
        for number, kind in queue:
            try:
                await getattr(self, kind)(session)
                self.done[kind] += 1
            except (AssertionError, aiohttp.ClientError, TimeoutError) as error:
                self.wrong.append(f"{number} {kind}: {error!r:.500}")

    def ordinary(self, prompt: list[int], **fields) -> dict:
        sampling = dict(max_tokens=4, temperature=1, seed=7)
        return dict(model=MODEL, prompt=prompt) | sampling | fields

    def targets(self, prompt: list[int]) -> list:
        """Random targets, in either form, with unscored ids and empty rows."""
        rng = self.rng
        num_rows = rng.randint(1, min(len(prompt) - 1, rng.choice([3, 40, 249])))
        if rng.random() < 0.5:
            return [rng.randrange(-1, VOCABULARY) for _ in range(num_rows)]
        width = rng.randint(1, MAX_LOGPROBS)
        rows = [
            [rng.randrange(-1, VOCABULARY) for _ in range(rng.randint(0, width))]
            for _ in range(num_rows - 1)
        ]
        return [*rows, [5]]

    def sampling(self) -> dict:
        return {
            "max_tokens": self.rng.choice([0, 0, 1, 5]),
            "n": self.rng.choice([1, 1, 1, 2]),
            "seed": self.rng.choice([None, 5]),
        }

    async def send(self, session, path: str, body: dict | bytes) -> tuple[int, dict]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        async with session.post(path, data=data, headers=headers) as response:
            self.statuses[response.status] += 1
            return response.status, json.loads(await response.read())

    async def score(self, session, path: str, body: dict, expected: list) -> None:
        """Checks an answer against (prompt, targets) of each of its prompts."""
        encoding = {"target_logprobs_encoding": self.rng.choice(["json", "npy"])}
        status, answer = await self.send(session, path, body | encoding)
        assert status == 200, (status, answer)
        num_choices = len(answer["choices"]) // len(expected)
        repeated = [pair for pair in expected for _ in range(num_choices)]
        for choice, pair in zip(answer["choices"], repeated, strict=True):
            assert_choice(choice, self.oracle, *pair)

    async def score_ids(self, session) -> None:
        prompt = self.rng.choice(self.prompts)
        targets = self.targets(prompt)
        body = dict(model=MODEL, prompt=prompt, target_token_ids=targets)
        await self.score(
            session, COMPLETIONS, body | self.sampling(), [(prompt, targets)]
        )

    async def score_batch(self, session) -> None:
        prompts = self.rng.choices(self.prompts, k=self.rng.randint(1, 5))
        targets = [self.targets(prompt) for prompt in prompts]
        body = dict(model=MODEL, prompt=prompts, target_token_ids=targets)
        await self.score(
            session, COMPLETIONS, body | self.sampling(), [*zip(prompts, targets)]
        )

    async def score_text(self, session) -> None:
        pairs = self.rng.choices(TEXTS, k=self.rng.randint(1, 4))
        prompts, targets = zip(*pairs)
        body = dict(model=MODEL, prompt=prompts, target_text=targets)
        expected = [continuation(*pair) for pair in pairs]
        await self.score(session, COMPLETIONS, body | self.sampling(), expected)

    async def score_continuations(self, session) -> None:
        rng = self.rng
        prompt = rng.choice(self.prompts[:-1])
        room = MAX_MODEL_LEN - len(prompt)
        targets = [
            [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, min(room, 9)))]
            for _ in range(rng.randint(1, 8))
        ]
        body = dict(model=MODEL, prompt=prompt, continuations=targets, max_tokens=0)
        status, answer = await self.send(session, COMPLETIONS, body)
        assert status == 200, (status, answer)
        for choice, ids in zip(answer["choices"], targets, strict=True):
            assert_continuation(choice, self.oracle, prompt + ids, ids)

    async def score_by_generate(self, session) -> None:
        prompt = self.rng.choice(self.prompts)
        targets = self.targets(prompt)
        body = dict(
            token_ids=prompt, target_token_ids=targets, sampling_params=self.sampling()
        )
        await self.score(session, GENERATE, body, [(prompt, targets)])

    async def complete(self, session) -> None:
        number = self.rng.randrange(len(self.prompts))
        body = self.ordinary(self.prompts[number])
        status, answer = await self.send(session, COMPLETIONS, body)
        assert status == 200, (status, answer)
        assert answer["choices"][0]["text"] == self.texts[number]
        assert "target_logprobs" not in answer["choices"][0]

    async def stream(self, session) -> None:
        number = self.rng.randrange(len(self.prompts))
        body = self.ordinary(self.prompts[number], stream=True)
        text = ""
        async with session.post(COMPLETIONS, json=body) as response:
            assert response.status == 200
            async for line in response.content:
                data = line.decode().removeprefix("data: ").strip()
                if data.startswith("{"):
                    text += json.loads(data)["choices"][0]["text"]
        assert text == self.texts[number]

    async def send_malformed(self, session) -> None:
        name, param, change = self.rng.choice(BAD)
        path, body = spoil(name, change, self.rng)
        status, answer = await self.send(session, path, body)
        assert status == 400, (str(body)[:200], status, answer)
        assert_names(answer["error"], param)

    async def send_large(self, session) -> None:
        path, param, body = large(self.rng.choice([*LARGE]))
        status, answer = await self.send(session, path, body)
        assert status == 400, (param, status, answer)
        assert_names(answer["error"], param)

    async def go_away(self, session) -> None:
        prompt = self.rng.choice(self.prompts[:-2])
        fields = dict(max_tokens=50, n=2, ignore_eos=True)
        body = self.ordinary(prompt, target_token_ids=self.targets(prompt), **fields)
        try:
            async with asyncio.timeout(self.rng.uniform(0, 0.2)):
                await self.send(session, COMPLETIONS, body)
        except TimeoutError:
            pass

    async def go_away_in_the_body(self, session) -> None:
        body = json.dumps(VALID["ids"][1]).encode()
        url = session._base_url
        _, writer = await asyncio.open_connection(url.host, url.port)
        writer.write(
            f"POST {COMPLETIONS} HTTP/1.1\r\nHost: {url.host}\r\n"
            "Content-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n".encode()
            + body[: self.rng.randrange(len(body))]
        )
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    async def go_away_in_the_stream(self, session) -> None:
        prompt = self.rng.choice(self.prompts[:-2])
        body = self.ordinary(prompt, stream=True, max_tokens=50, ignore_eos=True)
        async with session.post(COMPLETIONS, json=body) as response:
            assert response.status == 200
            await response.content.readline()
            response.close()
