# SPDX-License-Identifier: Apache-2.0
"""Waiting for what other processes do."""

import time
from collections.abc import Callable

PAUSE = 0.05  # seconds


def until(
    true: Callable[[], object], seconds: float, why: Callable[[], object] = str
) -> None:
    """Returns once a condition holds, which is looked at again and again.

    Args:
        true: the condition; what it raises ends the wait.
        seconds: the longest wait.
        why: called for the message if it has been too long.

    Raises:
        AssertionError: the condition does not hold in time.
    """
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, why()
        time.sleep(PAUSE)
