"""Reading ahead on one thread, bounded in bytes. Knows nothing of captures."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar

__all__ = ["Prefetch", "Sized"]


class Sized(Protocol):
    """Something to be read."""

    @property
    def size(self) -> int:
        """Bytes that reading it will take."""


_Item = TypeVar("_Item", bound=Sized)
_Value = TypeVar("_Value")


class Prefetch(Generic[_Item, _Value]):
    """Iterates over `read(item)` of the items that `items(stop)` gives, reading at most `limit` bytes ahead.

    One item is read ahead however large it is; a value of None is left out. What `items` or `read` raises is
    raised to the reader after the values before it. `items` ends soon after `stop` is set.
    """

    def __init__(
        self,
        items: Callable[[threading.Event], Iterator[_Item]],
        read: Callable[[_Item], _Value | None],
        limit: int,
    ) -> None:
        self._items = items
        self._read = read
        self._limit = limit
        self._stop = threading.Event()
        self._changed = threading.Condition()
        self._ready: deque[tuple[_Item, _Value]] = deque()
        self._bytes = 0
        self._unread: list[_Item] = []
        self._ended = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="hsconnector-prefetch", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[_Value]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ready or self._ended)
                if not self._ready:
                    break
                item, value = self._ready.popleft()
                self._bytes -= item.size
                self._changed.notify_all()
            yield value
        if self._error is not None:
            raise self._error

    def close(self) -> list[_Item]:
        """Ends the thread; the items that it took of `items` and whose values nobody got."""
        self._stop.set()
        with self._changed:
            self._changed.notify_all()
        self._thread.join()
        return [*(item for item, _ in self._ready), *self._unread]

    def _run(self) -> None:
        try:
            for item in self._items(self._stop):
                if not self._wait_for_room(item.size):
                    self._unread.append(item)
                    continue
                self._unread.append(item)
                value = self._read(item)
                self._unread.pop()
                with self._changed:
                    if value is not None:
                        self._ready.append((item, value))
                        self._bytes += item.size
                        self._changed.notify_all()
        except BaseException as error:
            self._error = error
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _wait_for_room(self, size: int) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._stop.is_set() or not self._ready or self._bytes + size <= self._limit)
            return not self._stop.is_set()
