"""What goes into a trainer's file and what comes out of one, whatever the format."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from hsconnector.capture.shard import Capture
from hsconnector.errors import SettingsError
from hsconnector.formats.draft_vocab import TokenCounts
from hsconnector.formats.norm import FinalNorm

__all__ = ["Exported", "Format", "Layers", "Sample", "split_layers"]


@dataclass(frozen=True)
class Layers:
    """Which layers of a capture a file holds, in vLLM's counting."""

    aux: tuple[int, ...]
    """Ascending; the states that the drafter reads."""
    last: int | None
    """N, the states that the final norm and the LM head turn into the target; None where the format leaves it out."""
    num_layers: int

    @property
    def ids(self) -> tuple[int, ...]:
        """All of them, ascending, in the order of a capture's slots."""
        return self.aux if self.last is None else (*self.aux, self.last)


@dataclass(frozen=True)
class Sample:
    """One capture on its way into a file.

    `capture.hidden_states` `[T, L, H]` holds exactly `layers.ids`; `loss_mask` `[T]` int64, 1 where a token counts;
    `norm` is there for the formats that store the last layer after it.
    """

    capture: Capture
    layers: Layers
    loss_mask: Any
    norm: FinalNorm | None = None


@dataclass(frozen=True)
class Exported:
    """One file read back.

    `token_ids` `[T]`, `aux` `[T, K * H]`; where the format has them `last` `[T, H]` and `loss_mask` `[T]`.
    """

    token_ids: Any
    aux: Any
    last: Any = None
    loss_mask: Any = None


class Format(Protocol):
    """What one trainer's files hold."""

    name: str
    suffix: str
    """Of the files, as the trainer's reader looks for them."""
    post_norm: bool
    """Whether the last layer is stored after the final norm."""
    has_mask: bool
    """Whether the files hold the loss mask; else the trainer takes it from its data set."""
    is_shard: bool
    """Whether a file is a whole shard, so that a shard with exactly these layers may be linked instead of written."""
    needs_row: bool
    """Whether the file name is the data set's row index."""
    vocab_size_names: tuple[str, ...]
    """Where the trainer looks for the target's vocabulary size in its `config.json`; empty where its drafts have the
    whole vocabulary."""

    def choose(self, layer_ids: tuple[int, ...], num_layers: int) -> Layers:
        """The layers of the captured (or asked) ones that the format takes; raises SettingsError."""

    def counting(self, layers: Layers) -> str:
        """The same layers as the trainer's own configuration names them."""

    def file_name(self, row: int | None, capture_id: str) -> str:
        """Ordered by row where there is one."""

    def refusal(self, loss_mask: Any) -> str:
        """Why the trainer would not take a sample with this mask `[T]`; empty if it does."""

    def vocabulary(self, counts: TokenCounts, size: int) -> dict[str, bytes]:
        """The files of a draft vocabulary of `size` tokens, by name, equal to what the trainer's own tool makes."""

    def vocabulary_use(self, folder: Path, size: int) -> str:
        """How the trainer is told of these files."""

    def write(self, sample: Sample, path: Path) -> None:
        """A new file; raises StoreError."""

    def read(self, path: str | os.PathLike[str]) -> Exported:
        """A file as the trainer reads it; raises ShardError."""


def split_layers(name: str, layer_ids: tuple[int, ...], num_layers: int, *, last: bool) -> Layers:
    """The last layer apart from the rest; raises SettingsError where `last` is wanted and N is not among them."""
    aux = tuple(layer for layer in layer_ids if layer != num_layers)
    if not last:
        return Layers(aux, None, num_layers)
    if num_layers not in layer_ids:
        raise SettingsError(
            f"{name} needs layer {num_layers}, the last before the final norm, which is not among the layers "
            f"{list(layer_ids)}: capture it, as `hsconnector launch` does unless --layers says otherwise"
        )
    return Layers(aux, num_layers, num_layers)
