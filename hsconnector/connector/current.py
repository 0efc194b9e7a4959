"""Whose weights the engine computes with now: those of its checkpoint, or what an update has made of them."""

from __future__ import annotations

import logging
import secrets
from collections import deque
from typing import Any

from hsconnector.connector.step import Step
from hsconnector.connector.watch import Glance, Watch, running_model
from hsconnector.connector.weights import Weights, hashed, loaded_weights, source_of

__all__ = ["Current"]

log = logging.getLogger("vllm.hsconnector.weights")


class Current:
    """The id of the weights in the engine, renewed when they have changed or may have.

    An update is named by what it made of the parameters on this rank: replicas that get the same one and are laid out
    alike have the same id, and weights that come back have theirs back. After `reload_weights` with a path, which vLLM
    notes in its configuration, the id is that of the checkpoint there. Where the model cannot be seen (`watch` is
    None) every reset of the caches may have been an update, and the id is random.
    """

    def __init__(self, vllm_config: Any, watch: Watch | None, vllm_version: str = "") -> None:
        self._vllm_config = vllm_config
        self._watch = watch
        self._version = vllm_version
        self.weights = self._load()
        self._first = self.id
        self.stale = False
        """Whether the prefix cache may hold rows that other weights have computed."""
        self.looks = self.settled = 0
        """How many glances were begun, and how many of them are answered and dealt with."""
        self._glances: deque[tuple[Glance, bool]] = deque()

    @classmethod
    def watched(cls, vllm_config: Any, vllm_version: str) -> Current:
        """For the runner that is calling, whose model is looked at; to be called when its weights are loaded."""
        current = cls(vllm_config, _watch(vllm_config), vllm_version)
        log.info("weights %s, from %s", current.id, current.weights.source)
        return current

    @property
    def id(self) -> str:
        """64 hex digits."""
        return self.weights.id

    @property
    def changed_id(self) -> str:
        """The id where it is not that of the start; empty where it is."""
        return "" if self.id == self._first else self.id

    def look(self, step: Step) -> bool:
        """Looks at the weights before this step; True where they have become others since the step before.

        All that has not begun in this step may be of both. What `glance` finds on a GPU it finds some steps later.
        """
        if step.emptied:
            self.stale = False
            self._glances = deque((glance, True) for glance, _ in self._glances)
        if self._watch is not None and (step.begun or step.finished or step.emptied):
            self._glances.append((self._watch.glance(), step.emptied))
            self.looks += 1
        changes = [emptied for changed, emptied in self._answers() if changed]
        suspect = bool(changes) or step.reset or source_of(self._vllm_config) != self._source
        if not suspect or not self.renew():
            return False
        self.stale = not (step.emptied or (changes and all(changes)))
        log.warning("the engine's weights have changed: open captures fail, new ones are of weights %s", self.id)
        return True

    def _answers(self) -> list[tuple[bool, bool]]:
        """Of each glance that is answered: whether the weights had changed, and whether the cache is emptied since."""
        answers = []
        while self._glances and self._glances[0][0].done():
            glance, emptied = self._glances.popleft()
            self.settled += 1
            answers.append((glance.changed, emptied))
        return answers

    def _load(self) -> Weights:
        self._source = source_of(self._vllm_config)
        self._fingerprint = self._look()
        try:
            self._checkpoint = loaded_weights(self._vllm_config, self._version)
        except Exception as error:
            log.exception("whose weights these are cannot be told")
            self._checkpoint = Weights(secrets.token_hex(32), f"nothing: {type(error).__name__}: {error}")
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


def _watch(vllm_config: Any) -> Watch | None:
    model = running_model()
    if model is None:
        log.warning("the model is not to be seen here: only resets of the caches tell that weights may have changed")
        return None
    moved = bool(getattr(vllm_config.parallel_config, "enable_eplb", False))
    try:
        return Watch(model, skip="experts" if moved else "")
    except Exception:
        log.exception("the model cannot be looked at: only resets of the caches tell that weights may have changed")
        return None
