# SPDX-License-Identifier: Apache-2.0
"""Which failures of a request pass, and how long to wait before the next attempt."""

import time
from collections.abc import Awaitable, Callable
from email.utils import parsedate_to_datetime
from typing import TypeVar

from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception_type,
    stop_before_delay,
    wait_exponential_jitter,
)

FIRST_WAIT, LONGEST_WAIT, JITTER = 0.1, 10.0, 0.1  # seconds between attempts
MALFORMED_ATTEMPTS = 5
"""Malformed answers to one request before the client gives up: a server that starts
or a proxy may send some, the wrong server sends nothing else."""
PASSING = frozenset({408, 409, 425, 429})
"""Statuses below 500 after which the same request may succeed."""

T = TypeVar("T")


class Passing(Exception):
    """A failure that may pass.

    Args:
        wait: seconds that the server asks for before the next attempt.
    """

    def __init__(self, reason: str, wait: float = 0.0):
        super().__init__(reason)
        self.wait = wait


class Malformed(Passing):
    """An answer that is not of the form that was asked for."""


def passes(status: int) -> bool:
    """Whether the same request may succeed later."""
    return status in PASSING or status >= 500


def retry_after(value: str) -> float:
    """Seconds of a `Retry-After` header, 0 if it says nothing (RFC 9110, section
    10.2.3: a number of seconds, or a date)."""
    value = value.strip()
    if value.replace(".", "", 1).isdecimal():
        return float(value)
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return 0.0


async def patiently(
    call: Callable[[], Awaitable[T]],
    *,
    patience: float,
    sleep: Callable[[float], Awaitable[None]],
    report: Callable[[Passing, float], None],
) -> T:
    """Calls until a call succeeds. The waits grow, and are no shorter than the server
    asks for.

    Args:
        patience: seconds from the first failure in which a next attempt may begin.
        sleep: waits for so many seconds.
        report: called with each failure and the seconds until the next attempt.

    Raises:
        Passing: the last failure; `Malformed` after `MALFORMED_ATTEMPTS` of these.
    """
    try:
        return await call()  # without what trying again costs to set up
    except Passing as failure:
        failures = [failure]

    async def again() -> T:
        if failures:  # so that tenacity's clock begins with the first failure
            raise failures.pop()
        return await call()

    backoff = wait_exponential_jitter(
        multiplier=FIRST_WAIT, max=LONGEST_WAIT, jitter=JITTER
    )
    is_over = stop_before_delay(patience)
    malformed = 0

    def wait(state: RetryCallState) -> float:
        return max(backoff(state), _failure(state).wait)

    def stop(state: RetryCallState) -> bool:
        nonlocal malformed
        malformed += isinstance(_failure(state), Malformed)
        return malformed >= MALFORMED_ATTEMPTS or is_over(state)

    retrying = AsyncRetrying(
        sleep=sleep,
        retry=retry_if_exception_type(Passing),
        wait=wait,
        stop=stop,
        before_sleep=lambda state: report(_failure(state), state.upcoming_sleep),
        reraise=True,
    )
    return await retrying(again)


def _failure(state: RetryCallState) -> Passing:
    return state.outcome.exception()
