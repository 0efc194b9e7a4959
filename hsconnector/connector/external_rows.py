"""Which blocks hold rows that another connector loaded, so that they have no hidden states. Pure Python.

Under a `MultiConnector` another connector may load part of a prompt's KV cache from outside. The hidden states of those
tokens were not computed here. The blocks stay in the engine's prefix cache, where later requests hit them like any
other, and those requests cannot be captured either.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["ExternalRows"]


class ExternalRows:
    """Remembers each block that was filled from outside until a request computes its rows here.

    `block_size` is the hidden group's, `hit_size` the scheduler's. The engine tells connectors of its own prefix-cache
    hits in whole blocks of `hit_size` only. So a request that is scheduled with up to `hit_size - 1` more tokens than
    were told has not necessarily loaded any.
    """

    def __init__(self, block_size: int, hit_size: int) -> None:
        self._block_size = block_size
        self._hit_size = hit_size
        self._local: dict[str, int] = {}
        """Of requests not scheduled yet: tokens that the engine found in its own prefix cache."""
        self._foreign: set[int] = set()
        """Blocks that were filled from outside."""
        self._seen = False
        """Whether any load was ever seen; from then on every difference counts as one."""

    @property
    def mixed(self) -> bool:
        """Whether any block holds rows from outside."""
        return bool(self._foreign)

    def offered(self, request_id: str, local: int) -> None:
        """The engine found `local` tokens in its own prefix cache and asks connectors for more."""
        self._local[request_id] = local

    def loaded(self, request_id: str, external: int, table: Sequence[int]) -> str:
        """Another connector loads `external` tokens beyond the engine's own into `table`; returns what that means."""
        return self._fill(self._local.get(request_id, 0), external, table)

    def computed(self, blocks: Sequence[int]) -> None:
        """A request computes all rows of these blocks here."""
        self._foreign.difference_update(blocks)

    def arrived(self, request_id: str, table: Sequence[int], num_computed: int) -> str | None:
        """A request is scheduled or has ended, with `num_computed` tokens in `table` that no step of it computed.

        Returns what was loaded for it from outside, in one sentence, or None.
        """
        found = num_computed - self._local.pop(request_id, num_computed)
        if found >= (1 if self._seen else self._hit_size):
            return self._fill(num_computed - found, found, table)
        return None

    def hit(self, table: Sequence[int], num_computed: int) -> str | None:
        """Which of the first `num_computed` rows lie in blocks that were filled from outside, or None."""
        if not self._foreign:
            return None
        hits = table[: self._blocks(num_computed)]
        foreign = [index for index, block in enumerate(hits) if block in self._foreign]
        if not foreign:
            return None
        first, last = foreign[0] * self._block_size, min(num_computed, (foreign[-1] + 1) * self._block_size) - 1
        return f"rows from {first} to {last} were found in blocks that were loaded from outside"

    def fresh(self, table: Sequence[int], num_computed: int) -> Sequence[int]:
        """The blocks behind those that hold the first `num_computed` rows: nothing is in them yet."""
        return table[self._blocks(num_computed) :]

    def forget(self, request_id: str) -> None:
        """The request has ended; its blocks stay known."""
        self._local.pop(request_id, None)

    def _fill(self, local: int, external: int, table: Sequence[int]) -> str:
        self._seen = True
        self._foreign.update(table[local // self._block_size : self._blocks(local + external)])
        return f"{external} tokens were loaded from outside and have no hidden states here"

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._block_size)
