"""Where the rows of the hidden group came from. Pure Python.

Under a `MultiConnector` another connector may bring part of a prompt's KV cache from outside. Hidden states of those
tokens were not computed here, and its blocks stay in the engine's prefix cache, where later requests find them like
any other.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["ExternalRows"]


class ExternalRows:
    """Follows which blocks were filled from outside, until the engine gives them to a request that computes them.

    `block_size` is the hidden group's, `hit_size` the scheduler's: a local hit that does not end on its boundary is
    shown to connectors without its tail, so a difference smaller than that proves nothing.
    """

    def __init__(self, block_size: int, hit_size: int) -> None:
        self._block_size = block_size
        self._hit_size = hit_size
        self._local: dict[str, int] = {}
        """Of requests not scheduled yet: tokens that the engine found in its own prefix cache."""
        self._foreign: set[int] = set()
        self._seen = False

    @property
    def mixed(self) -> bool:
        """Whether any block holds rows from outside."""
        return bool(self._foreign)

    def offered(self, request_id: str, local: int) -> None:
        """The engine asks who has more than these tokens, which it has itself."""
        self._local[request_id] = local

    def loaded(self, request_id: str, external: int, table: Sequence[int]) -> str:
        """Another connector brings so many tokens, beyond what the engine had: what is wrong with these blocks."""
        return self._fill(self._local.get(request_id, 0), external, table)

    def computed(self, blocks: Sequence[int]) -> None:
        """These blocks are new to a request, which computes their rows here."""
        self._foreign.difference_update(blocks)

    def arrived(self, request_id: str, table: Sequence[int], num_computed: int) -> str | None:
        """A request is scheduled, for the first time or again, or over before that: what was loaded for it, or None."""
        found = num_computed - self._local.pop(request_id, num_computed)
        if found >= (1 if self._seen else self._hit_size):
            return self._fill(num_computed - found, found, table)
        return None

    def hit(self, table: Sequence[int], num_computed: int) -> str | None:
        """What is wrong with the rows that a scheduled request was found to have already, or None."""
        if not self._foreign:
            return None
        hits = table[: self._blocks(num_computed)]
        foreign = [index for index, block in enumerate(hits) if block in self._foreign]
        if not foreign:
            return None
        first, last = foreign[0] * self._block_size, min(num_computed, (foreign[-1] + 1) * self._block_size) - 1
        return f"rows from {first} to {last} were found in blocks that were loaded from outside"

    def fresh(self, table: Sequence[int], num_computed: int) -> Sequence[int]:
        """The blocks of a scheduled request that hold nothing yet."""
        return table[self._blocks(num_computed) :]

    def forget(self, request_id: str) -> None:
        """The request is over."""
        self._local.pop(request_id, None)

    def _fill(self, local: int, external: int, table: Sequence[int]) -> str:
        self._seen = True
        self._foreign.update(table[local // self._block_size : self._blocks(local + external)])
        return f"{external} tokens were loaded from outside and have no hidden states here"

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._block_size)
