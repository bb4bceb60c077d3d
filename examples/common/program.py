# SPDX-License-Identifier: Apache-2.0
"""How a command-line program begins and ends."""

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from common.errors import ClientError

INTERRUPTED = 130  # exit status of a program that Ctrl-C stopped


def any_terminal() -> None:
    """Prints `?` for a character that the terminal's encoding lacks, in place of a
    traceback."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


@contextmanager
def interruptible(goes_on: str = "") -> Iterator[None]:
    """Makes Ctrl-C end the program with one line.

    Args:
        goes_on: how to go on.
    """
    try:
        yield
    except KeyboardInterrupt:
        begin = "\n" if sys.stderr.isatty() else ""  # after the terminal's ^C
        print(f"{begin}interrupted. {goes_on}".rstrip(), file=sys.stderr)
        sys.exit(INTERRUPTED)


@contextmanager
def options_named() -> Iterator[None]:
    """Names the option where an argument of a client is at fault."""
    try:
        yield
    except ClientError as error:
        if error.url is not None or error.param is None:
            raise
        option = "--" + error.param.replace("_", "-")
        raise ClientError(error.message, param=option) from error
