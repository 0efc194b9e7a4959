"""Long polls: readers sleep until a name (a capture, a request) is told of; nobody asks the index in a loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import TypeVar

__all__ = ["LEASES", "ROOM", "Waiters"]

LEASES = "leases"
"""Told of when a capture may have become free to lend."""
ROOM = "room"
"""Told of when there may be more room in the store."""

_T = TypeVar("_T")


class Waiters:
    """Who waits for which name; lives in the event loop."""

    def __init__(self) -> None:
        self._events: dict[str, set[asyncio.Event]] = defaultdict(set)
        self._loop: asyncio.AbstractEventLoop | None = None
        self.closing = False

    def start(self) -> None:
        """From now on `announce` reaches those who wait in the running loop."""
        self._loop = asyncio.get_running_loop()

    def __len__(self) -> int:
        return sum(len(events) for events in self._events.values())

    def tell(self, names: Iterable[str]) -> None:
        """Wakes everyone who waits for one of the names; in the event loop."""
        for name in names:
            for event in self._events.get(name, ()):
                event.set()

    def announce(self, names: Iterable[str] = ()) -> None:
        """Wakes them from any thread, and with them those who wait for captures to lend or for room."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.tell, [*names, LEASES, ROOM])

    def close(self) -> None:
        """Wakes everyone, now and from now on: the sidecar stops."""
        self.closing = True
        for events in self._events.values():
            for event in events:
                event.set()

    async def until(self, name: str, ask: Callable[[], Awaitable[_T]], done: Callable[[_T], bool], wait_s: float) -> _T:
        """Asks now and whenever `name` is told of, until `done` or `wait_s` seconds are over; gives the last answer."""
        deadline = asyncio.get_running_loop().time() + wait_s
        with self._listening(name) as event:
            while True:
                event.clear()
                answer = await ask()
                left = deadline - asyncio.get_running_loop().time()
                if done(answer) or left <= 0 or self.closing:
                    return answer
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(event.wait(), left)

    @contextlib.contextmanager
    def _listening(self, name: str) -> Iterator[asyncio.Event]:
        event = asyncio.Event()
        self._events[name].add(event)
        try:
            yield event
        finally:
            self._events[name].discard(event)
            if not self._events[name]:
                del self._events[name]
