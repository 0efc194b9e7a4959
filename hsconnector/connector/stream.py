"""One accepted stream: its staging memory, its queue, and the captures that are open in it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from hsconnector.capture.protocol import CaptureInfo, Commit, FailReason, Message, Open, ProducerAccepted, Rows, Span
from hsconnector.connector.ring import Ring

__all__ = ["Item", "Loss", "Stream", "Ticket", "place_spans"]


class Ticket(Protocol):
    """A copy of rows that may still be on its way into staging memory."""

    def done(self) -> bool:
        """Whether the rows have arrived there."""
        ...

    def wait(self) -> None:
        """Returns when they have."""
        ...


@dataclass(slots=True)
class Item:
    """A message in the queue; `ticket` is set for rows, whose memory is released when they are answered."""

    message: Message
    ticket: Ticket | None = None

    @property
    def size(self) -> int:
        """About how many bytes it adds to a batch; what is always small does not count."""
        if isinstance(self.message, Rows):
            return self.message.span.length
        if isinstance(self.message, Commit):
            return len(self.message.token_ids)
        return len(self.message.capture.request_id) if isinstance(self.message, Open) else 0


@dataclass(frozen=True, slots=True)
class Loss:
    """A capture that failed on our side, and why."""

    info: CaptureInfo
    reason: FailReason
    detail: str


@dataclass(slots=True)
class Stream:
    """One accepted stream with the staging memory that it alone uses."""

    accepted: ProducerAccepted
    ring: Ring
    seq: int = 0
    queue: deque[Item] = field(default_factory=deque)
    open: dict[str, CaptureInfo] = field(default_factory=dict)
    failing: dict[str, Loss] = field(default_factory=dict)


def place_spans(stream: Stream, items: list[Item]) -> tuple[tuple[Message, ...], list[memoryview]]:
    """The messages with spans as the sidecar sees them, and the bytes that go into the body."""
    messages: list[Message] = []
    payload: list[memoryview] = []
    position = 0
    for item in items:
        message = item.message
        if isinstance(message, Rows) and not message.span.shared:
            span = message.span
            payload.append(stream.ring.view(span.offset, span.length))
            message = msgspec.structs.replace(message, span=Span(position, span.length))
            position += span.length
        messages.append(message)
    return tuple(messages), payload
