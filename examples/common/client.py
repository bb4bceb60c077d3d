# SPDX-License-Identifier: Apache-2.0
"""A client of a server that `vllm serve` started, or of any OpenAI-compatible one.

`Client` and `AsyncClient` have the same methods; those of the latter are awaited.
Either keeps its connections, tries failures that may pass again, and raises one
exception, `ClientError`.
"""

import asyncio
import concurrent.futures
import queue
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from common.answers import Model
from common.async_client import AsyncClient

P = ParamSpec("P")
T = TypeVar("T")


def _waits(
    method: Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate["Client", P], T]:
    """The same method of the sync client."""

    @wraps(method)
    def call(self: "Client", *args: P.args, **kwargs: P.kwargs) -> T:
        return self.run(method(self.aio, *args, **kwargs))

    return call


class Client:
    """`AsyncClient` for programs that do not await; any threads may share one.

    Its requests run in a thread of its own. Takes the same arguments.
    """

    def __init__(self, base_url: str = "http://localhost:8000/v1", *args, **options):
        self.aio = AsyncClient(base_url, *args, **options)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    models = _waits(AsyncClient.models)
    connect = _waits(AsyncClient.connect)
    metrics = _waits(AsyncClient.metrics)
    tokenize = _waits(AsyncClient.tokenize)
    detokenize = _waits(AsyncClient.detokenize)
    score_ids = _waits(AsyncClient.score_ids)
    score_text = _waits(AsyncClient.score_text)
    score_continuations = _waits(AsyncClient.score_continuations)
    complete = _waits(AsyncClient.complete)
    chat = _waits(AsyncClient.chat)
    request = _waits(AsyncClient.request)

    @property
    def url(self) -> str:
        return self.aio.url

    @property
    def model(self) -> Model | None:
        return self.aio.model

    @property
    def retries(self) -> int:
        return self.aio.retries

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        """The result of a call of `aio`; Ctrl-C cancels it."""
        future = self._submit(call)
        try:
            return future.result()
        finally:
            future.cancel()

    def as_completed(
        self, calls: Iterable[Coroutine[Any, Any, T]]
    ) -> Iterator[tuple[int, T]]:
        """Makes calls of `aio` side by side.

        Yields:
            Each one's index and result as soon as it is there. What is left is given
            up when one fails or the iterator is closed; after a failure no further
            request is sent.
        """
        done: queue.SimpleQueue[tuple[int, T] | None] = queue.SimpleQueue()
        future = self._submit(_side_by_side(list(calls), done.put))
        try:
            while (found := done.get()) is not None:
                yield found
            future.result()
        finally:
            future.cancel()

    def _submit(self, call: Coroutine[Any, Any, T]) -> "concurrent.futures.Future[T]":
        return asyncio.run_coroutine_threadsafe(call, self._loop)

    def close(self) -> None:
        if self._loop.is_closed():
            return
        self.run(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _stop(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self.aio.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        self.close()


async def _side_by_side(
    calls: list[Coroutine[Any, Any, T]],
    report: Callable[[tuple[int, T] | None], None],
) -> None:
    """Reports each call's index and result, and None at the end."""

    async def make(index: int) -> None:
        try:
            report((index, await calls[index]))
        except Exception:
            # Here and not when the task has ended: calls that wait for this one's
            # place are woken before that.
            for task in tasks - {asyncio.current_task()}:
                task.cancel()
            raise

    tasks = {asyncio.create_task(make(index)) for index in range(len(calls))}
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for call in calls:
            call.close()  # those that have not begun
        report(None)
