# SPDX-License-Identifier: Apache-2.0
"""What goes wrong between a client and a server."""


class ClientError(Exception):
    """A request that was refused, or could not be made.

    Attributes:
        message: what the server says, or what is wrong.
        status: HTTP status of a refusal; None if no answer is to blame.
        param: field of the request, or argument of the client, that is at fault, if
            one is named.
        url: address of the request without credentials; None if none was made.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        param: str | None = None,
        url: str | None = None,
    ):
        super().__init__(message)
        self.message = message
        self.status = status
        self.param = param
        self.url = url

    def __str__(self) -> str:
        if self.url is None:
            return f"{self.param} {self.message}" if self.param else self.message
        if self.status is None:
            return f"{self.url}: {self.message}"
        named = self.param and self.param not in self.message
        where = f" ({self.param})" if named else ""
        return f"{self.url} refuses: {self.status}: {self.message}{where}"


class ServerGone(ClientError):
    """The server gave no good answer for longer than the client's patience."""
