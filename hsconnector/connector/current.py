"""Whose weights the engine computes with now: those of its checkpoint, or what an update has made of them."""

from __future__ import annotations

import secrets
from typing import Any, Protocol

from hsconnector.connector.weights import Weights, hashed, loaded_weights, source_of

__all__ = ["Current", "Fingerprint"]


class Fingerprint(Protocol):
    """What can say whether weights in memory are the same as before."""

    def fingerprint(self) -> str: ...


class Current:
    """The id of the weights in the engine, renewed when they have changed or may have.

    An update is named by what it made of the parameters on this rank: replicas that get the same one and are laid out
    alike have the same id, and weights that come back have theirs back. After `reload_weights` with a path, which vLLM
    notes in its configuration, the id is that of the checkpoint there. Where the model cannot be seen (`watch` is
    None) every reset of the caches may have been an update, and the id is random.
    """

    def __init__(self, vllm_config: Any, watch: Fingerprint | None, vllm_version: str = "") -> None:
        self._vllm_config = vllm_config
        self._watch = watch
        self._version = vllm_version
        self.weights = self._load()

    @property
    def id(self) -> str:
        """64 hex digits."""
        return self.weights.id

    def _load(self) -> Weights:
        self._source = source_of(self._vllm_config)
        self._fingerprint = self._look()
        self._checkpoint = loaded_weights(self._vllm_config, self._version)
        return self._checkpoint

    def _look(self) -> str:
        return secrets.token_hex(32) if self._watch is None else self._watch.fingerprint()

    def renew(self) -> bool:
        """Looks at all of the weights; True where they are others now."""
        before = self.id
        self.weights = self._load() if source_of(self._vllm_config) != self._source else self._updated(self._look())
        return self.id != before

    def _updated(self, fingerprint: str) -> Weights:
        if fingerprint == self._fingerprint:
            return self._checkpoint
        changed = hashed("updated", self._checkpoint.id, fingerprint)
        return Weights(changed, f"{self._checkpoint.source}, updated since in the engine's memory")
