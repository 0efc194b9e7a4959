"""Answers that say no, as exceptions; `server.app` turns them into responses."""

from __future__ import annotations

from hsconnector.errors import HSConnectorError

__all__ = ["Refusal", "bad_parameter", "too_large", "unprocessable"]


class Refusal(HSConnectorError):
    """A request that is answered with an error: HTTP status, stable type, sentence, parameter."""

    def __init__(self, status: int, kind: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param


def bad_parameter(name: str, message: str) -> Refusal:
    """A query parameter that cannot be understood."""
    return Refusal(400, "bad_request", message, name)


def too_large(limit: int) -> Refusal:
    """A body over the limit."""
    return Refusal(
        413, "body_too_large", f"the body has more than {limit} bytes, the most this sidecar takes in one call"
    )


def unprocessable(param: str, message: str) -> Refusal:
    """A producer that contradicts itself."""
    return Refusal(422, "bad_producer", message, param)
