"""Rows -> prompts, conversations in processes of their own, so that the engines do not wait for a chat template."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from typing import Any

from hsconnector.errors import UnsupportedError
from hsconnector.prompts.chat import ChatTokenizer, load_tokenizer
from hsconnector.prompts.encoded import Encoded
from hsconnector.prompts.preparation import Preparation
from hsconnector.prompts.prompt import Missing, Prompt, PromptReader, Row

__all__ = ["Recipe", "default_workers", "prepare"]

Numbered = tuple[int, Row]

_CHUNK = 64
"""Rows handed to a process at one time."""
_ALONE = 4
"""Chunks with conversations that are encoded here before processes are started for the rest."""


def default_workers() -> int:
    """A process for each core but one."""
    return max(1, min(8, len(os.sched_getaffinity(0)) - 1))


@dataclass
class Recipe:
    """All that it takes to read rows, also in another process."""

    tokenizer: str
    preparation: Preparation
    id_field: str = ""
    max_tokens: int = 0
    _loaded: list[ChatTokenizer] = field(default_factory=list, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_loaded": []}

    def read(self, rows: Iterable[Numbered]) -> list[Prompt | Missing]:
        """The prompts of some rows; raises SettingsError or UnsupportedError where conversations cannot be encoded."""
        reader = PromptReader(self._encode, self.id_field, self.max_tokens, self.preparation)
        return [reader.read(row, index) for index, row in rows]

    def _encode(self, conversation: object, tools: object) -> Encoded:
        if not self._loaded:
            self._loaded.append(load_tokenizer(self.tokenizer, preparation=self.preparation))
        return self._loaded[0].encode(conversation, tools)


def prepare(rows: Iterator[Numbered], recipe: Recipe, workers: int) -> Iterator[Prompt | Missing]:
    """The prompts of rows, in their order; conversations but the first few are encoded by so many processes.

    Raises as `Recipe.read` does, and UnsupportedError where a process dies.
    """
    chunks = iter(lambda: list(itertools.islice(rows, _CHUNK)), [])
    for chunk in itertools.islice(chunks, _ALONE) if workers else chunks:
        yield from recipe.read(chunk)
    yield from _ahead(chunks, recipe, workers)


def _ahead(chunks: Iterator[list[Numbered]], recipe: Recipe, workers: int) -> Iterator[Prompt | Missing]:
    pool: ProcessPoolExecutor | None = None
    under_way: deque[list[Prompt | Missing] | Future[list[Prompt | Missing]]] = deque()
    try:
        for chunk in chunks:
            if any(_is_conversation(row) for _, row in chunk):
                pool = pool or _pool(recipe, workers)
                under_way.append(pool.submit(_read, chunk))
            else:
                under_way.append(recipe.read(chunk))
            if len(under_way) > 2 * workers:
                yield from _outcome(under_way.popleft())
        while under_way:
            yield from _outcome(under_way.popleft())
    finally:
        if pool is not None:
            pool.shutdown(wait=True, cancel_futures=True)


def _outcome(read: list[Prompt | Missing] | Future[list[Prompt | Missing]]) -> list[Prompt | Missing]:
    if isinstance(read, list):
        return read
    try:
        return read.result()
    except BrokenProcessPool as error:
        raise UnsupportedError(
            "a process that encodes conversations died, perhaps for want of memory: start the same command again with "
            "--workers 0, or fewer than now"
        ) from error


def _is_conversation(row: Row) -> bool:
    return isinstance(row, Mapping) and row.get("input_ids") is None


def _pool(recipe: Recipe, workers: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _begin, (recipe,))


_recipe: Recipe
"""In a process of the pool: what it reads with."""


def _begin(recipe: Recipe) -> None:
    global _recipe
    _recipe = recipe
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command itself ends its processes
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A killed command leaves no process behind that waits for work."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _read(rows: list[Numbered]) -> list[Prompt | Missing]:
    return _recipe.read(rows)
