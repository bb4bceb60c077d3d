# SPDX-License-Identifier: Apache-2.0
"""Many clients at once, most of them wrong: nothing breaks, and each is told.

SERVING_REQUESTS=2000 python -m pytest tests/serving/test_serving_soak.py  # the long run
"""

import asyncio
import os
import time

from scoring_server import assert_choice
from scoring_texts import LONG
from serving_clients import Clients
from waiting import until

REQUESTS = int(os.environ.get("SERVING_REQUESTS", 300))
"""Requests of the random run."""


def test_many_clients(server, llama):
    """No 5xx, no wrong answer, each refusal names its parameter, and in the end the
    server has nothing left to do and goes on scoring."""
    clients = Clients(server, llama, seed=REQUESTS)
    start = time.monotonic()
    asyncio.run(clients.run(REQUESTS))
    seconds = time.monotonic() - start
    print(f"\n{REQUESTS} requests in {seconds:.0f} s:", dict(clients.done))
    print("answers by status:", dict(clients.statuses))
    assert not clients.wrong, "\n".join(clients.wrong[:10])
    assert sum(clients.done.values()) == REQUESTS
    assert not [status for status in clients.statuses if status >= 500]
    # An abort reaches the engine a moment after its client has gone.
    until(lambda: not any(server.gauges().values()), 60, server.gauges)
    (choice,) = server.ask(prompt=LONG, target_token_ids=LONG[1:], max_tokens=0)[
        "choices"
    ]
    assert_choice(choice, llama, LONG, LONG[1:])
