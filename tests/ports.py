# SPDX-License-Identifier: Apache-2.0
"""Ports of the loopback for servers that are about to start."""

import socket


def reserve() -> socket.socket:
    """A socket bound to a free port, which is taken by nobody else while it is open.

    A server that sets `SO_REUSEADDR`, as `vllm serve` does, can bind to the port beside
    it, since it does not listen. The kernel gives such a port to no connection and to
    nobody who asks for any port. A port that is free and then let go may be taken before
    the server binds.
    """
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("127.0.0.1", 0))
    return reserved


def number(reserved: socket.socket) -> int:
    return reserved.getsockname()[1]
