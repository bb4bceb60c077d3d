# SPDX-License-Identifier: Apache-2.0
"""Draws text from between two models, token by token, over two live servers.

One request to each server a token. It extends each prompt by a token that is only
guessed, and does three things at once:

- It scores the candidates of the guessed token's position by name, exactly, on both
  servers: a row of `target_token_ids` depends on what is before its position, not on
  the token there, so the guess does not matter for it.
- From these scores alone the token is drawn: the largest log-weight + noise, where the
  noise belongs to sample, position and token id. The guess was the same draw from the
  lists of most likely tokens, so it is nearly always the same token.
- If so, the lists that came along are those of the next position. If not, the drawn
  token stands and the lists are asked for again.

Tokens that neither list names are drawn as well: what such a token can weigh is at most
what the last tokens of both lists do, so only those few whose noise is large enough to
win nevertheless have to be scored.

So the text is a function of the models, the settings and the seed. Guesses, failures
and restarts change the time only.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np
from common import ClientError
from tqdm import tqdm

from dual_vllm import tilted
from dual_vllm.config import CoordinatorConfig
from dual_vllm.server import Answer, Server, TopK

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

NOT_SCORED = -1
# Tokens of the prompt that the drawn ones are decoded with, to read as they do there.
PROMPT_TAIL = 8
LOG_ZERO = -1e4
"""Stands for the log of a probability that is zero."""
MARGIN = 0.05
"""Nats by which the search for tail tokens is wider than the guess says."""
PROBE = (
    "def f(x):\n\treturn x**2 + 10  # naïve café, 東京 🙂\r\n<|endoftext|></s><s> A1b2"
)
"""A text on which two tokenizers that differ would hardly agree."""


class Diagnostics(NamedTuple):
    """What is known of one drawn token; divergences and entropies in nats."""

    alpha: float
    kl_a: float  # KL(q || a), see tilted.estimate_log_z
    kl_b: float
    ess_a: (
        float  # share of draws that count when reweighted to a, the rest as one token
    )
    ess_b: float
    entropy: float  # of q, the rest as one token
    entropy_a: float  # of the whole vocabulary, as the server says
    entropy_b: float
    coverage_a: float  # mass of the candidates
    coverage_b: float
    candidates: int
    tv_bound: float  # see tilted.bounds
    kl_bound: float
    guessed: bool  # one request was enough


class Step(NamedTuple):
    """One drawn token."""

    sample: int
    position: int  # among the drawn tokens
    token_id: int
    diagnostics: Diagnostics
    finish_reason: str | None  # of the sample, with its last token: stop or length
    candidates: np.ndarray  # [n] int64
    logprobs: np.ndarray  # [2, n + 1] float64, nats, of a and b; last, the rest
    q: np.ndarray  # [n + 1] float64
    top: tuple[TopK, TopK]  # the lists that the candidates were taken from


@dataclass
class GenerationOutput:
    """One sample."""

    sample: int
    prompt_token_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    diagnostics: list[Diagnostics] = field(default_factory=list)
    finish_reason: str | None = None
    text: str = ""  # without the token that it stopped at


@dataclass
class Guess:
    """A position whose token is guessed but not drawn yet."""

    token: int
    candidates: np.ndarray  # [n] int64
    top: tuple[TopK, TopK]  # the lists they are from
    log_least: np.ndarray  # [2], no other token has a greater log-probability
    noise: tilted.Noise
    tail: np.ndarray  # [t] int64, tokens of the rest that may be drawn
    logprobs: np.ndarray  # [2, .] exact, of as many of candidates and tail as are known

    @property
    def ids(self) -> np.ndarray:
        return np.concatenate([self.candidates, self.tail])

    @property
    def unknown(self) -> np.ndarray:
        """Ids to be scored."""
        return self.ids[self.logprobs.shape[1] :]


@dataclass
class Sample:
    """A sample under way."""

    output: GenerationOutput
    guess: Guess | None = None

    @property
    def ids(self) -> list[int]:
        return self.output.prompt_token_ids + self.output.token_ids


class DualVLLMCoordinator:
    """Samples from between the models of two servers.

    ```python
    async with DualVLLMCoordinator(CoordinatorConfig(url_a=..., url_b=...)) as dual:
        outputs = await dual.generate_batch(["import numpy as"], progress=True)
        async for text, step in dual.stream("def main("):
            print(text, end="")
    ```

    Several may run side by side, in one process or in many.
    """

    def __init__(self, config: CoordinatorConfig):
        self.config = config
        options = {
            "api_key": config.api_key.get_secret_value(),
            "patience": config.patience,
            "timeout": config.timeout,
        }
        self.servers = (
            Server(config.url_a, model=config.model_a, **options),
            Server(config.url_b, model=config.model_b, **options),
        )
        self.rounds = 0
        """How often both servers were asked."""

    async def __aenter__(self) -> Self:
        try:
            await self._connect()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_) -> None:
        await self.close()

    async def close(self) -> None:
        await asyncio.gather(*(server.close() for server in self.servers))

    @cached_property
    def tokenizer(self) -> "PreTrainedTokenizerBase":
        from transformers import AutoTokenizer  # takes seconds

        name = self.config.tokenizer or self.servers[0].model.root
        try:
            return AutoTokenizer.from_pretrained(name)
        except (OSError, ValueError) as error:
            if self.config.tokenizer:
                raise ClientError(f"tokenizer {name!r}: {error}") from error
            raise ClientError(
                f"no tokenizer at {name!r}, which is where server a has its model: "
                "set tokenizer"
            ) from error

    @cached_property
    def vocabulary(self) -> int:
        """Token ids are below this."""
        return max(self.tokenizer.get_vocab().values()) + 1

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end a sample."""
        ids = {*self.config.stop_token_ids}
        if not self.config.ignore_eos:
            ids = ids.union(*(end_ids(server.model.root) for server in self.servers))
            ids.add(self.tokenizer.eos_token_id)
        return frozenset(ids - {None})

    @cached_property
    def max_model_len(self) -> int:
        return min(server.model.max_model_len for server in self.servers)

    async def _connect(self) -> None:
        """Checks that both servers do what is needed, with the same vocabulary.

        Raises:
            ClientError: one does not.
            ServerGone: one does not answer.
            ValueError: a stop token is outside the vocabulary.
        """
        await self._both(lambda server: server.connect())
        ids = await asyncio.to_thread(lambda: self.tokenizer.encode(PROBE))
        everything = list(range(self.vocabulary))
        texts = await self._both(lambda s: s.detokenize(everything))
        for name, text in zip("ab", texts):
            if text != self.tokenizer.decode(everything):
                raise ClientError(
                    f"server {name} has another vocabulary than the tokenizer "
                    f"{self.tokenizer.name_or_path!r}: token ids do not mean the same"
                )
        for name, found in zip("ab", await self._both(lambda s: s.tokenize(PROBE))):
            if found != ids:
                raise ClientError(
                    f"server {name} splits text into other tokens than the tokenizer "
                    f"{self.tokenizer.name_or_path!r}"
                )
        wrong = [i for i in self.config.stop_token_ids if i >= self.vocabulary]
        if wrong:
            raise ValueError(f"stop_token_ids: {wrong} are outside the vocabulary")
        if not self.config.ignore_eos:  # files that are broken are told now
            roots = [server.model.root for server in self.servers]
            await asyncio.to_thread(lambda: [*map(end_ids, roots)])
        # The largest request there will be; a server that can not serve it says why.
        row = [i % self.vocabulary for i in range(self.config.max_candidates)]
        top_k = min(self.config.top_k, self.vocabulary)
        await self._both(lambda s: s.ask([ids[:2]], [row], top_k=top_k))

    async def _both(self, call) -> list:
        """Calls both servers at once; if one fails, the other is not waited for."""
        tasks = [asyncio.ensure_future(call(server)) for server in self.servers]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    def sample(self, number: int, prompt: str | Sequence[int]) -> Sample:
        """A sample that is to be drawn. Its number and the seed decide its noise.

        Raises:
            ValueError: the prompt is empty, too long or not of token ids.
        """
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else [*prompt]
        if not ids:
            raise ValueError(f"prompt {number} is empty")
        if len(ids) + 2 > self.max_model_len:
            raise ValueError(
                f"prompt {number} has {len(ids)} tokens; at most "
                f"{self.max_model_len - 2} leave room to draw one"
            )
        if not all(0 <= i < self.vocabulary for i in ids):
            raise ValueError(f"prompt {number} has ids outside the vocabulary")
        return Sample(GenerationOutput(number, ids))

    async def generate_batch(
        self,
        prompts: Iterable[str | Sequence[int]],
        *,
        progress: bool = False,
        on_steps: Callable[[list[Step]], None] | None = None,
    ) -> list[GenerationOutput]:
        """A sample of each prompt; its number is that of the prompt.

        Args:
            prompts: texts or token ids.
            progress: show a bar.
            on_steps: called with the tokens of each round.
        """
        samples = [self.sample(*pair) for pair in enumerate(prompts)]
        total = len(samples) * self.config.max_tokens
        with tqdm(total=total, unit="token", disable=None if progress else True) as bar:
            async for steps in self.steps(deque(samples)):
                bar.update(len(steps))
                if on_steps is not None:
                    on_steps(steps)
        for sample in samples:
            self.set_text(sample.output)
        return [sample.output for sample in samples]

    async def stream(
        self, prompt: str | Sequence[int], *, number: int = 0
    ) -> AsyncIterator[tuple[str, Step]]:
        """Text as it is drawn, a token at a time. Where a token ends within a
        character, its text comes with the next one."""
        sample = self.sample(number, prompt)
        output, shown = sample.output, ""
        async for steps in self.steps(deque([sample])):
            self.set_text(output)
            text = output.text
            if output.finish_reason is None:
                text = text.rstrip("\N{REPLACEMENT CHARACTER}")
            yield text[len(shown) :], steps[0]
            shown = text

    def set_text(self, output: GenerationOutput) -> None:
        ids = output.token_ids
        if output.finish_reason == "stop":
            ids = ids[:-1]
        # After the prompt's last tokens, so that no leading space is lost.
        before = output.prompt_token_ids[-PROMPT_TAIL:]
        start, text = (
            self.tokenizer.decode(part, skip_special_tokens=True)
            for part in (before, before + ids)
        )
        if not text.startswith(start):  # a character begins in the prompt
            start, text = "", self.tokenizer.decode(ids, skip_special_tokens=True)
        output.text = text[len(start) :]

    async def steps(
        self, queue: deque[Sample], at_once: int | None = None
    ) -> AsyncIterator[list[Step]]:
        """Draws the samples of a queue, `batch_size` at a time or fewer; the tokens of
        each round as they come. Several coordinators may share a queue.

        A sample that has some tokens already goes on from there. When this ends early
        for whatever reason, the samples hold exactly the tokens of the yielded steps.
        """
        at_once = min(at_once or self.config.batch_size, self.config.batch_size)
        active: list[Sample] = []
        while True:
            while queue and len(active) < at_once:
                active.append(queue.popleft())
            if not active:
                return
            answers = await self._ask(active)
            drawn = map(self._advance, active, zip(*answers))
            steps = [step for step in drawn if step is not None]
            active = [s for s in active if s.output.finish_reason is None]
            if steps:
                yield steps

    async def _ask(self, active: list[Sample]) -> list[list[Answer]]:
        """One request to each server for all samples."""
        prompts = [s.ids + ([s.guess.token] if s.guess else []) for s in active]
        targets = None
        if any(s.guess for s in active):
            # Nothing can be named in a prompt of one token.
            if any(len(prompt) == 1 for prompt in prompts):
                return await self._ask_apart(active)
            targets = [
                s.guess.unknown.tolist() if s.guess else [NOT_SCORED] for s in active
            ]
        self.rounds += 1
        top_k = min(self.config.top_k, self.vocabulary)
        return await self._both(
            lambda server: server.ask(prompts, targets, top_k=top_k)
        )

    async def _ask_apart(self, active: list[Sample]) -> list[list[Answer]]:
        """As `_ask`, with samples of one token in a request of their own."""
        new = [len(s.ids) == 1 and s.guess is None for s in active]
        answers = [
            iter(zip(*await self._ask([s for s, x in zip(active, new) if x == part])))
            for part in (False, True)
        ]
        return [*zip(*(next(answers[part]) for part in new))]

    def _advance(self, sample: Sample, pair: tuple[Answer, Answer]) -> Step | None:
        """Draws a token if the answers of both servers allow it, and guesses the next
        one if they allow that."""
        guess, step = sample.guess, None
        if guess is not None:
            scores = np.stack([answer.scores for answer in pair])
            scores = np.maximum(scores, LOG_ZERO)
            entropy = (pair[0].entropy, pair[1].entropy)
            step = self._draw(sample, guess, scores, entropy)
            if step is None:
                return None
            output = sample.output
            output.token_ids.append(step.token_id)
            output.diagnostics.append(step.diagnostics)
            output.finish_reason = step.finish_reason
            sample.guess = None
            if step.finish_reason is not None or step.token_id != guess.token:
                return step
        sample.guess = self._guess(sample, pair)
        return step

    def _guess(self, sample: Sample, pair: tuple[Answer, Answer]) -> Guess:
        """Candidates from both lists of most likely tokens, and a guess from what the
        lists say: a token that one of them lacks is given its least probability."""
        top = (pair[0].top, pair[1].top)
        sizes = [self._size(one) for one in top]
        listed = {i for one, n in zip(top, sizes) for i in one.ids[:n].tolist()}
        candidates = np.array(sorted(listed), dtype=np.int64)
        candidates = candidates[candidates < self.vocabulary]
        log_least = np.array([one.logprobs[n - 1] for one, n in zip(top, sizes)])
        logprobs = np.empty((2, len(candidates)))
        for row, one, least in zip(logprobs, top, log_least):
            order = np.argsort(one.ids)
            at = np.searchsorted(one.ids, candidates, sorter=order)
            at = order[np.minimum(at, len(order) - 1)]
            row[:] = np.where(one.ids[at] == candidates, one.logprobs[at], least)
        alpha = tilted.solve_alpha(tilted.with_rest(logprobs))
        position = len(sample.output.token_ids)
        noise = tilted.Noise(self.config.seed, sample.output.sample, position)
        value = tilted.log_weights(logprobs, alpha) + noise.of(candidates)
        best = int(np.argmax(value))
        tail = np.empty(0, np.int64)
        unknown = np.empty((2, 0))
        token = int(candidates[best])
        guess = Guess(token, candidates, top, log_least, noise, tail, unknown)
        if self.config.tail == "keep":
            guess.tail = self._contenders(guess, alpha, value[best] - MARGIN)
        return guess

    def _size(self, top: TopK) -> int:
        """How many tokens of a list are needed to leave out `tail_mass` at most."""
        if not self.config.tail_mass:
            return len(top.ids)
        mass = np.cumsum(np.exp(top.logprobs))
        enough = int(np.searchsorted(mass, 1 - self.config.tail_mass)) + 1
        return min(enough, len(top.ids))

    def _contenders(self, guess: Guess, alpha: float, value: float) -> np.ndarray:
        """Tokens of the rest, not in the guess yet, whose log-weight + noise may exceed
        a value: their log-probabilities are at most `log_least`, so their noise must
        make up for it. No more than fit one request; the next round finds the others.
        """
        log_most = tilted.log_weights(guess.log_least, alpha)
        loud = guess.noise.loudest(self.vocabulary, value - log_most)
        known = set(guess.ids.tolist())
        more = [i for i in loud.tolist() if i not in known]
        room = self.config.max_candidates - len(guess.unknown)
        return np.array(more[:room], dtype=np.int64)

    def _draw(
        self,
        sample: Sample,
        guess: Guess,
        scores: np.ndarray,
        entropy: tuple[float, float],
    ) -> Step | None:
        """Draws a token from exact scores `[2, n]` of what was unknown. None if tokens
        of the rest have to be scored first."""
        at_once = guess.logprobs.shape[1] == 0
        guess.logprobs = np.hstack([guess.logprobs, scores])
        logprobs = tilted.with_rest(guess.logprobs[:, : len(guess.candidates)])
        alpha = tilted.solve_alpha(logprobs)
        value = tilted.log_weights(guess.logprobs, alpha) + guess.noise.of(guess.ids)
        best = int(np.argmax(value))
        if self.config.tail == "keep":
            more = self._contenders(guess, alpha, value[best])
            if len(more):
                guess.tail = np.concatenate([guess.tail, more])
                return None
        token = int(guess.ids[best])
        guessed = at_once and token == guess.token
        q, diagnostics = describe(logprobs, alpha, entropy, guessed)
        return Step(
            sample=sample.output.sample,
            position=len(sample.output.token_ids),
            token_id=token,
            diagnostics=diagnostics,
            finish_reason=self._finish_reason(sample, token),
            candidates=guess.candidates,
            logprobs=logprobs,
            q=q,
            top=guess.top,
        )

    def _finish_reason(self, sample: Sample, token: int) -> str | None:
        if token in self.stop_ids:
            return "stop"
        if len(sample.output.token_ids) + 1 >= self.config.max_tokens:
            return "length"
        # The next token is asked for with a guess of it and room for one more.
        if len(sample.ids) + 1 + 2 > self.max_model_len:
            return "length"
        return None


@cache
def end_ids(root: str) -> frozenset[int]:
    """Tokens that end a text by the files of a model, tokenizer and
    generation_config.json; none of a file that is not there.

    Raises:
        ClientError: generation_config.json is broken.
    """
    from transformers import AutoTokenizer, GenerationConfig
    from transformers.utils import GENERATION_CONFIG_NAME
    from transformers.utils.hub import has_file

    tokenizer = None
    with suppress(OSError, ValueError):
        tokenizer = AutoTokenizer.from_pretrained(root)
    ids = {tokenizer.eos_token_id} if tokenizer is not None else set()
    there = False
    with suppress(OSError, ValueError):
        there = has_file(root, GENERATION_CONFIG_NAME)
    if there:
        try:
            named = GenerationConfig.from_pretrained(root).eos_token_id
        except (OSError, ValueError, TypeError) as error:
            raise ClientError(
                f"{GENERATION_CONFIG_NAME} of {root!r} can not be read: {error}"
            ) from error
        named = named if isinstance(named, list) else [named]
        if any(type(i) is not int for i in named if i is not None):
            raise ClientError(
                f"{GENERATION_CONFIG_NAME} of {root!r}: eos_token_id {named} is no "
                "token ids"
            )
        ids.update(named)
    elif tokenizer is None:
        logger.warning(
            "%r is not here, so its own end-of-sequence tokens are not known: name "
            "them with stop_token_ids",
            root,
        )
    return frozenset(ids - {None})


def describe(
    logprobs: np.ndarray, alpha: float, entropy: tuple[float, float], guessed: bool
) -> tuple[np.ndarray, Diagnostics]:
    """q `[n + 1]` of candidates and rest, and what is to be said of it."""
    q, log_z = tilted.tilt(logprobs, alpha)
    slope = float(q @ (logprobs[1] - logprobs[0]))
    log_z_all = tilted.estimate_log_z(logprobs, alpha)
    bound = tilted.bounds(logprobs, alpha)
    ess = tilted.effective_sample_size(logprobs, q)
    coverage = np.exp(logprobs[:, :-1]).sum(axis=1)
    return q, Diagnostics(
        alpha=alpha,
        kl_a=alpha * slope - log_z_all,
        kl_b=(alpha - 1) * slope - log_z_all,
        ess_a=float(ess[0]),
        ess_b=float(ess[1]),
        entropy=log_z - float(q @ tilted.log_weights(logprobs, alpha)),
        entropy_a=entropy[0],
        entropy_b=entropy[1],
        coverage_a=float(coverage[0]),
        coverage_b=float(coverage[1]),
        candidates=len(q) - 1,
        tv_bound=bound.total_variation,
        kl_bound=bound.kl,
        guessed=guessed,
    )
