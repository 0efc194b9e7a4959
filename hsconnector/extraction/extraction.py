"""Drives engines through a data set until the sidecar has a sound capture of each row.

A run keeps nothing on disk: the sidecar is asked by content hash what is there, so a run that was killed is simply
started again.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date

from hsconnector.capture.content import Content
from hsconnector.capture.protocol import CaptureState, pack_token_ids
from hsconnector.capture.record import CaptureRecord
from hsconnector.client.async_client import AsyncClient
from hsconnector.errors import HSConnectorError
from hsconnector.extraction.book import Noted
from hsconnector.extraction.content import CaptureUnfit, judge
from hsconnector.extraction.engine import Engine, EngineAway, EngineBusy, EngineRefused
from hsconnector.extraction.engines import Engines
from hsconnector.extraction.ledger import Fate, Ledger
from hsconnector.prompts.encoded import Encoded, check_ids
from hsconnector.prompts.prompt import Dropped, Missing, Prompt, RowRefused

__all__ = ["Extraction", "ExtractionStopped", "Order"]

_LOOKED_UP = 500
"""Rows read, hashed and looked up together."""
_LONGEST_PAUSE_S = 15.0


class ExtractionStopped(HSConnectorError):
    """So many rows failed one after the other that going on would be in vain."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """What to ask for and how."""

    model: str
    """As the engine serves it."""
    dataset: str
    """The data set's name, which each capture carries."""
    tags: Mapping[str, str] = field(default_factory=dict)
    concurrency: int = 32
    """Requests at the engines at one time."""
    attempts: int = 3
    """How often one row is asked for; unsound captures of earlier runs count."""
    capture_timeout_s: float = 120.0
    """Seconds that a capture may take to become final once its request is answered."""
    pause_s: float = 0.5
    """Seconds before the second attempt; doubles with each further one."""
    quiet_s: float = 15.0
    """Seconds without an answer, beside some times the longest so far, after which an engine counts as hanging."""
    accept_unknown_weights: bool = False
    """Captures that do not say whose weights they are of, found by names, are taken as well."""
    away_s: float = 600.0
    """Seconds without a good answer of any engine after which the run ends."""

    @property
    def patience(self) -> int:
        """Rows that may fail one after the other before the run stops."""
        return max(10, 2 * self.concurrency)


@dataclass
class _Ask:
    """A row that the engines are asked for, at most `attempts` times."""

    prompt: Prompt
    digest: str
    attempts: int
    used_up: frozenset[str]
    begun: bool = False
    """A capture of its sample is under way that this run did not ask for."""
    compared: bool = False
    """Its tokens are known to be those that an engine makes of it, or that none can tell."""


class Extraction:
    """One run over a data set. `changed` is called whenever the ledger changed."""

    def __init__(
        self,
        order: Order,
        engines: Sequence[Engine],
        sidecar: AsyncClient,
        content: Content,
        ledger: Ledger,
        *,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self.ledger = ledger
        self._order = order
        self.engines = Engines(engines, pause_s=order.pause_s, quiet_s=order.quiet_s, away_s=order.away_s)
        self._sidecar = sidecar
        self._content = content
        self._changed = changed
        self._slots = asyncio.Semaphore(order.concurrency)

    async def run(self, samples: Iterator[Prompt | Missing], taken: Callable[[Prompt], None] = lambda _: None) -> None:
        """Captures what is not there yet; `taken` is told each prompt, in order.

        Raises ExtractionStopped, EngineUnusable, SidecarUnreachable or SidecarRefused; then what was captured stays.
        """
        await self._await_leftovers()
        ticking = asyncio.ensure_future(self._tick())
        try:
            async with asyncio.TaskGroup() as tasks:
                asks: asyncio.Queue[list[_Ask] | None] = asyncio.Queue(1)
                tasks.create_task(self._look_up(samples, taken, asks))
                while (chunk := await asks.get()) is not None:
                    async for ask in self._still_wanted(chunk):
                        await self._slots.acquire()
                        tasks.create_task(self._capture(ask)).add_done_callback(lambda _: self._slots.release())
        except BaseExceptionGroup as group:
            ours, _ = group.split(HSConnectorError)
            if ours is None:
                raise
            raise _first(ours) from None
        finally:
            ticking.cancel()
            self.ledger.waits = ""
        await self._await_leftovers()
        await self._look_again()
        self._settle_repeats()

    async def _tick(self) -> None:
        """Tells every second who waits for whom, also when no row comes to its end."""
        while True:
            await asyncio.sleep(1)
            resting = self.engines.resting
            if resting:
                self.ledger.waits = f"waiting for {', '.join(resting)}"
            else:
                self.ledger.waits = "the engines are busy" if self._slots.locked() else "the engines wait for rows"
            self._changed()

    async def _look_up(
        self,
        samples: Iterator[Prompt | Missing],
        taken: Callable[[Prompt], None],
        asks: asyncio.Queue[list[_Ask] | None],
    ) -> None:
        """Runs ahead of the engines: puts into the queue what is to be asked for, then None."""
        while chunk := await asyncio.to_thread(_take, samples, _LOOKED_UP):
            await asks.put(await self._wanted(chunk, taken))
        await asks.put(None)

    async def _still_wanted(self, chunk: list[_Ask]) -> AsyncIterator[_Ask]:
        """Looks again at each few rows just before they are asked for: another run may be at work on the same data.

        Where one is, the rows are taken in any order, so that the two do not go through them side by side.
        """
        while chunk:
            few, chunk = chunk[: self._order.concurrency], chunk[self._order.concurrency :]
            found = await self._sidecar.lookup([ask.digest for ask in few])
            begun = Counter(record.sample_id for record in await self._sidecar.receiving(self._order.dataset))
            for ask in few:
                ask.begun = ask.prompt.sample_id in begun
                if not self._stored_meanwhile(ask, found[ask.digest]):
                    yield ask
            if any(ask.begun for ask in few) or max(begun.values(), default=0) > 1:
                random.shuffle(chunk)

    def _stored_meanwhile(self, ask: _Ask, records: list[CaptureRecord]) -> bool:
        there = _is_ready(records)
        if there:
            self.ledger.stored_meanwhile += 1
            self.ledger.stored(ask.prompt)
            self._note(ask.prompt, ask.digest, Fate.STORED, ask.used_up)
            self._changed()
        return there

    async def _await_leftovers(self, sample_id: str | None = None) -> None:
        """Waits for captures that an earlier run, or an earlier attempt, began."""
        begun = await self._sidecar.receiving(self._order.dataset, sample_id)
        waited = self._order.capture_timeout_s
        await asyncio.gather(*(self._sidecar.wait(record.capture_id, waited) for record in begun))

    async def _wanted(self, chunk: Iterable[Prompt | Missing], taken: Callable[[Prompt], None]) -> list[_Ask]:
        """The rows of a chunk to ask for; those that have a capture or can never have one go into the ledger."""
        prompts: dict[str, Prompt] = {}
        for sample in chunk:
            if isinstance(sample, Missing):
                self._leave_out(sample)
                continue
            taken(sample)
            self.ledger.thoughts_left_out += sample.thoughts_left_out
            digest = self._content.hash_of(pack_token_ids(sample.token_ids))
            first = self.ledger.book.meet(digest, sample.row)
            if first == sample.row:
                prompts[digest] = sample
            else:
                self.ledger.book.repeat(sample, first)
        found = await self._sidecar.lookup(list(prompts))
        older = await self._of_unknown_weights({each: prompts[each] for each in prompts if not _is_ready(found[each])})
        asks = []
        for digest, prompt in prompts.items():
            taken_by, records = older.get(digest) or (digest, found[digest])
            ask = await self._compare(prompt, taken_by, records)
            asks += [ask] if ask else []
        self._changed()
        return asks

    async def _of_unknown_weights(self, prompts: Mapping[str, Prompt]) -> dict[str, tuple[str, list[CaptureRecord]]]:
        """By content hash, the hash and the ready captures of the same by names alone, where such are taken."""
        if not (self._order.accept_unknown_weights and self._content.weights_id):
            return {}
        version_1 = self._content.version_1
        by_names = {digest: version_1(pack_token_ids(prompt.token_ids)) for digest, prompt in prompts.items()}
        found = await self._sidecar.lookup(list(by_names.values()))
        return {digest: (old, found[old]) for digest, old in by_names.items() if _is_ready(found[old])}

    def _leave_out(self, sample: Missing) -> None:
        if isinstance(sample, Dropped):
            self.ledger.dropped(sample)
        else:
            self.ledger.refused(sample)

    async def _compare(self, prompt: Prompt, digest: str, records: list[CaptureRecord]) -> _Ask | None:
        """What is left to ask for a row with these captures: nothing where one is ready, or too many were unsound."""
        used_up = _used_up(records)
        if _is_ready(records):
            await self._keep_oldest(records)
            self.ledger.stored(prompt)
            self._note(prompt, digest, Fate.STORED, used_up)
            return None
        unsound = [record for record in records if record.state is CaptureState.QUARANTINED]
        attempts = self._order.attempts - len(unsound)
        if attempts > 0:
            return _Ask(prompt, digest, attempts, used_up)
        last = unsound[-1]
        self._fail(prompt, f"{len(unsound)} captures of it are unsound, the last {last.capture_id}: {last.findings}")
        return None

    async def _capture(self, ask: _Ask) -> None:
        """One row, until it is captured or has been asked for often enough."""
        attempt, reason, engine = 0, "", None
        if ask.begun:
            await self._await_leftovers(ask.prompt.sample_id)
            if self._stored_meanwhile(ask, (await self._sidecar.lookup([ask.digest]))[ask.digest]):
                return None
        while attempt < ask.attempts:
            if attempt and await self._captured_after_all(ask, attempt):
                return self._book(ask)
            try:
                capture_id, engine = await self.engines.run(lambda chosen: self._asked(ask, chosen), engine)
                await self._judge(ask, capture_id)
            except EngineAway:
                continue  # it was not asked; what Engines waits for is bounded
            except (EngineBusy, CaptureUnfit) as error:
                attempt, reason = attempt + 1, str(error)
                if isinstance(error, CaptureUnfit) and not error.again:
                    return self._fail(ask.prompt, reason)
                engine = error.engine if isinstance(error, EngineBusy) else engine
            except EngineRefused as error:
                return self._fail(ask.prompt, str(error))
            except RowRefused as error:
                return self._refuse(ask.prompt, str(error))
            else:
                return self._book(ask)
        return self._fail(ask.prompt, f"{reason} (attempt {ask.attempts} of {ask.attempts})", in_vain=True)

    async def _asked(self, ask: _Ask, engine: Engine) -> str:
        """The id of a capture; raises RowRefused where the engine renders the row's conversation to other ids."""
        if not ask.compared and (whole := ask.prompt.whole) is not None:
            await self._compare_rendering(whole, engine)
            ask.compared = True
        return await engine.capture(self._body(ask))

    async def _compare_rendering(self, whole: Encoded, engine: Engine) -> None:
        if whole.day not in (None, date.today()):  # the engine would write today's date
            self.ledger.of_another_day += 1
        elif (ids := await engine.rendered(self._order.model, whole.request)) is None:
            self.ledger.local += 1
        else:
            check_ids(ids, whole)

    async def _judge(self, ask: _Ask, capture_id: str) -> None:
        waited = self._order.capture_timeout_s
        judge(await self._sidecar.wait(capture_id, waited), ask.prompt, self._content, waited_s=waited)

    def _body(self, ask: _Ask) -> dict[str, object]:
        hidden_states = {
            "capture": True,
            "dataset": self._order.dataset,
            "sample_id": ask.prompt.sample_id,
            "tags": {**self._order.tags, "row": str(ask.prompt.row)},
            "include_output_tokens": False,
            "expected_content_hash": ask.digest,
        }
        return {
            "model": self._order.model,
            "prompt": list(ask.prompt.token_ids),
            "max_tokens": 1,
            "temperature": 0,
            "kv_transfer_params": {"hidden_states": hidden_states},
        }

    async def _captured_after_all(self, ask: _Ask, attempt: int) -> bool:
        """Pauses, waits for captures of this row that are under way, and tells whether one is ready.

        The answer to the attempt before may have been lost while the engine went on with it.
        """
        self.ledger.retries += 1
        pause = min(self._order.pause_s * 2 ** (attempt - 1), _LONGEST_PAUSE_S)
        await asyncio.sleep(pause * random.uniform(0.5, 1.0))
        await self._await_leftovers(ask.prompt.sample_id)
        records = (await self._sidecar.lookup([ask.digest]))[ask.digest]
        return _is_ready(records)

    def _book(self, ask: _Ask) -> None:
        prompt = ask.prompt
        self.ledger.captured(prompt)
        self._note(prompt, ask.digest, Fate.CAPTURED, ask.used_up)
        self._changed()

    def _note(self, prompt: Prompt, digest: str, fate: Fate, used_up: frozenset[str]) -> None:
        self.ledger.book.note(Noted(digest, prompt.row, prompt.sample_id, len(prompt.token_ids), fate, used_up))

    def _fail(self, prompt: Prompt, reason: str, *, in_vain: bool = False) -> None:
        self.ledger.failed(Missing(prompt.row, prompt.sample_id, reason), in_vain=in_vain)
        self._stop_where_all_fail(reason)

    def _refuse(self, prompt: Prompt, reason: str) -> None:
        """A row that the engine renders otherwise; where it does so with all of them, the run stops."""
        self.ledger.refused(Missing(prompt.row, prompt.sample_id, reason), in_vain=True)
        self._stop_where_all_fail(reason)

    def _stop_where_all_fail(self, reason: str) -> None:
        self._changed()
        if self.ledger.failed_in_a_row >= self._order.patience:
            raise ExtractionStopped(
                f"stopped after {self.ledger.failed_in_a_row} rows failed one after the other, the last one: {reason}; "
                "start the same command again to go on"
            )

    def _settle_repeats(self) -> None:
        for row, sample_id, first in self.ledger.book.repeats():
            if first in self.ledger.with_capture:
                self.ledger.repeated(row)
            else:
                self.ledger.failed(Missing(row, sample_id, f"has the tokens of row {first}, which failed"))
        self._changed()

    async def _look_again(self) -> None:
        """Asks at the end whether each capture is still there: since it was booked, retention may have removed it.

        A capture that was acknowledged during the run counts as there. A request that was given up may have been
        captured in the end: of two captures of a row one is removed.
        """
        for piece in self.ledger.book.noted(_LOOKED_UP):
            for digest, records in (await self._sidecar.lookup(list(piece))).items():
                if _is_ready(records):
                    await self._keep_oldest(records)
                elif not _used_up(records) - piece[digest].used_up:
                    self._lose(piece[digest], records)
            self._changed()

    def _lose(self, noted: Noted, records: list[CaptureRecord]) -> None:
        why = f": {records[-1].detail}" if records and records[-1].detail else ""
        reason = (
            f"was {noted.fate}, and is not in the sidecar any more{why}; where its retention took it, give it a "
            "larger --quota or --ttl-s, or extract in parts"
        )
        self.ledger.lost(Missing(noted.row, noted.sample_id, reason), Fate(noted.fate), noted.tokens)

    async def _keep_oldest(self, records: list[CaptureRecord]) -> None:
        """Removes the younger captures of a sample: a request whose answer was lost may have been captured as well."""
        ready = [record for record in records if record.state is CaptureState.READY]
        kept: set[tuple[str, str]] = set()
        for record in sorted(ready, key=lambda record: record.capture_id):
            sample = (record.dataset, record.sample_id)
            if sample in kept and record.dataset == self._order.dataset:
                await self._sidecar.delete(record.capture_id)
                self.ledger.doubles += 1
            kept.add(sample)


def _take(samples: Iterator[Prompt | Missing], count: int) -> list[Prompt | Missing]:
    return list(itertools.islice(samples, count))


def _used_up(records: Sequence[CaptureRecord]) -> frozenset[str]:
    return frozenset(record.capture_id for record in records if record.consumed)


def _first(group: BaseExceptionGroup[HSConnectorError]) -> HSConnectorError:
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error


def _is_ready(records: Iterable[CaptureRecord]) -> bool:
    return any(record.state is CaptureState.READY for record in records)
