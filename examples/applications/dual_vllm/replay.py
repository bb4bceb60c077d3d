# SPDX-License-Identifier: Apache-2.0
"""Answers that servers gave, given again by a process that does nothing else.

So the coordinator's own cost is seen apart from servers that work on the same cores.
"""

import asyncio
import multiprocessing
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection

from aiohttp import web

from dual_vllm.server import Server

Answers = dict[tuple[str, bytes], bytes]
"""Content of what was answered, by path and content of the request."""


def record(server: Server) -> Answers:
    """Keeps what a server answers from now on."""
    answers: Answers = {}
    send = server.client.send

    async def send_and_keep(
        method: str, path: str, data: bytes | None, kind: str
    ) -> bytes:
        answers[path, data or b""] = content = await send(method, path, data, kind)
        return content

    server.client.send = send_and_keep
    return answers


@contextmanager
def replay(answers: Sequence[Answers]) -> Iterator[list[str]]:
    """Yields the address of a server for each of them, all in one process.

    A request that was not recorded is a 400.
    """
    context = multiprocessing.get_context("spawn")  # a fork would have our threads
    here, there = context.Pipe()
    process = context.Process(target=_run, args=(there, answers), daemon=True)
    process.start()
    there.close()  # so that the end of the process is seen
    try:
        port = here.recv()
        yield [f"http://127.0.0.1:{port}/{n}/v1" for n in range(len(answers))]
    finally:
        process.terminate()
        process.join()


def _run(pipe: Connection, answers: Sequence[Answers]) -> None:
    asyncio.run(_serve(pipe, answers))


async def _serve(pipe: Connection, answers: Sequence[Answers]) -> None:
    async def answer(request: web.BaseRequest) -> web.Response:
        _, number, path = request.path.split("/", 2)
        content = answers[int(number)].get((f"/{path}", await request.read()))
        if content is None:
            message = b'{"error": {"message": "not recorded"}}'
            return web.Response(status=400, body=message)
        return web.Response(body=content, content_type="application/json")

    runner = web.ServerRunner(web.Server(answer))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    pipe.send(runner.addresses[0][1])
    await asyncio.Event().wait()
