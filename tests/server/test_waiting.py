"""Who waits is woken by what happens on other threads, not by looking again and again."""

from __future__ import annotations

import asyncio
import threading

import pytest

from server.waiting import LEASES, ROOM, Waiters


@pytest.mark.parametrize("name", ["capture", LEASES, ROOM])
def test_a_word_from_another_thread_wakes_who_waits(name: str) -> None:
    """For a capture, and with it for captures to lend and for room."""
    asked = []

    async def ask() -> int:
        asked.append(name)
        if len(asked) == 1:
            threading.Thread(target=waiters.announce, args=(["capture"],)).start()
        return len(asked)

    async def scenario() -> int:
        waiters.start()
        return await asyncio.wait_for(waiters.until(name, ask, lambda count: count == 2, 600), 20)

    waiters = Waiters()
    assert asyncio.run(scenario()) == 2
    waiters.announce(["capture"])  # after the loop's end nobody waits
