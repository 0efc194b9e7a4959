"""The engines of a run: who gets the next request, and how one that restarts, hangs or died is told and waited for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from hsconnector.extraction.engine import Engine, EngineAway, EngineBusy, EngineUnusable

__all__ = ["Engines"]

_LONGEST_REST_S = 15.0
_LOOK_S = 0.2
_TIMES_LONGEST = 4
"""An engine is waited for so many times as long as any answer took so far, beside `quiet_s`."""
_T = TypeVar("_T")


@dataclass(slots=True)
class _Place:
    """One engine, by what it answers."""

    engine: Engine
    running: int = 0
    asked: int = 0
    heard_at: float = 0.0
    """When it answered last, or was given work after it had none."""
    well_at: float = 0.0
    """When it last did what it was asked."""
    doubted: bool = False
    """It gets one request at a time until it answers well."""
    rest_s: float = 0.0
    resting_until: float = 0.0

    def free(self, now: float) -> bool:
        return now >= self.resting_until and not (self.doubted and self.running)

    def well(self, now: float) -> None:
        self.heard_at = self.well_at = now
        self.doubted, self.rest_s = False, 0.0

    def unwell(self, now: float, first_rest_s: float) -> None:
        self.doubted = True
        if now >= self.resting_until:
            self.rest_s = min(self.rest_s * 2 or first_rest_s, _LONGEST_REST_S)
            self.resting_until = now + self.rest_s


class Engines:
    """Gives each request to the engine with the fewest under way.

    An engine that does not answer gets no more for a while, then one request at a time until it answers well. It hangs
    when it has answered nothing for `quiet_s` and some times the longest answer so far; each time that is found, the
    next is waited for twice as long. Where none has done anything for `away_s` the run ends with EngineUnusable.
    """

    def __init__(
        self, engines: Sequence[Engine], *, pause_s: float = 0.5, quiet_s: float = 15.0, away_s: float = 600.0
    ) -> None:
        self._places = [_Place(engine) for engine in engines]
        self._pause_s = pause_s
        self._quiet_s = quiet_s
        self._away_s = away_s
        self._longest_s: float | None = None
        self._trouble_since: float | None = None
        self._trouble = ""

    @property
    def resting(self) -> list[str]:
        """The engines that are waited for."""
        return [place.engine.url for place in self._places if place.doubted]

    async def run(self, work: Callable[[Engine], Awaitable[_T]], avoid: Engine | None = None) -> tuple[_T, Engine]:
        """The outcome of `work` with an engine, another than `avoid` where one is free, and that engine.

        Raises what the work raises, and EngineBusy for an engine that hangs; each carries the engine.
        """
        place = await self._free(avoid)
        begun = time.monotonic()
        place.heard_at = place.heard_at if place.running else begun
        place.running += 1
        place.asked += 1
        task = asyncio.ensure_future(work(place.engine))
        try:
            await self._progress(place, task)
            result = task.result()
        except EngineBusy as error:
            error.engine = place.engine
            self._unwell(place, begun, error)
            raise
        except asyncio.CancelledError:
            raise
        except Exception:
            self._well(place, begun)
            raise
        else:
            self._well(place, begun)
            return result, place.engine
        finally:
            place.running -= 1
            task.cancel()

    async def _free(self, avoid: Engine | None) -> _Place:
        while True:
            now = time.monotonic()
            if self._trouble_since is not None and now - self._trouble_since > self._away_s:
                raise EngineUnusable(
                    f"no engine has done anything for {self._away_s:g} s, the last trouble: {self._trouble}; "
                    "start the same command again once one does"
                )
            free = [place for place in self._places if place.free(now)]
            if free:
                return min(free, key=lambda place: (place.engine is avoid, place.running, place.asked))
            until = min(place.resting_until for place in self._places)
            await asyncio.sleep(min(max(until - now, 0.01), _LOOK_S))

    async def _progress(self, place: _Place, task: asyncio.Future[_T]) -> None:
        """Returns once the task is done; raises EngineBusy where its engine answers nothing any more."""
        while not (await asyncio.wait({task}, timeout=min(_LOOK_S, self._quiet_s)))[0]:
            quiet = time.monotonic() - place.heard_at
            if self._longest_s is not None and quiet > self._quiet_s + _TIMES_LONGEST * self._longest_s:
                if not place.doubted:
                    self._quiet_s *= 2
                raise EngineBusy(
                    f"the engine at {place.engine.url} has answered none of its {place.running} requests for "
                    f"{quiet:.0f} s"
                )

    def _well(self, place: _Place, begun: float) -> None:
        now = time.monotonic()
        place.well(now)
        self._longest_s = max(self._longest_s or 0.0, now - begun)
        self._trouble_since = None

    def _unwell(self, place: _Place, begun: float, error: EngineBusy) -> None:
        now = time.monotonic()
        self._trouble = str(error)
        if place.well_at < begun or isinstance(error, EngineAway):
            place.unwell(now, self._pause_s)
            if all(each.doubted for each in self._places) and self._trouble_since is None:
                self._trouble_since = now
