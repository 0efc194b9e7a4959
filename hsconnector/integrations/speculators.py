"""The hidden-states backend `hsconnector` of speculators: its trainer reads captures from a sidecar.

`hsconnector train …` registers it and runs `speculators train …`. Made for speculators and hs-connectors 0.9.

A sample that is stored already is found by the content hash of its row, so that neither file names nor the order of
rows matter; any other is asked of the engine by the trainer, and its handle leads here. Either way the checksum, the
model, the layers and the norm are checked: the trainer itself would train on wrong layers without a word.

The sidecar's key is taken from `HSC_API_KEY`, in each data-loading process.
"""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, TypeVar
from urllib.parse import urlsplit

import torch
from hs_connectors import HiddenStatesBackend, HiddenStatesTransfer

from hsconnector.capture.content import Content, choose_weights
from hsconnector.capture.layers import parse_layer_ids
from hsconnector.capture.protocol import CaptureState, is_capture_id
from hsconnector.capture.record import CaptureRecord
from hsconnector.capture.shard import Capture
from hsconnector.client import DEFAULT_SIDECAR, Client
from hsconnector.client.address import default_sidecar
from hsconnector.client.passed import Passed, PassedOver
from hsconnector.errors import (
    CaptureExpired,
    CaptureNotFound,
    SettingsError,
    ShardError,
    SidecarUnreachable,
    StoreError,
)
from hsconnector.integrations.target_layers import TargetLayers, target_layers_of

__all__ = ["NAME", "RunSettings", "SidecarBackend", "SidecarTransfer", "load_trainer", "register", "trainer_sample"]

NAME = "hsconnector"

log = logging.getLogger("speculators.hsconnector")

_TRAIN_OPTIONS = (
    ("--hsc-model", "", "The model as the engine names it; default: the verifier."),
    ("--hsc-revision", "", "The revision the engine was started with."),
    ("--hsc-layers", "", "The layers the engine captures, if more than are trained on."),
    ("--hsc-lora", "", "The adapter that was captured."),
    ("--hsc-weights-id", "", "Whose weights, by the first digits of their id; default: the engine's."),
    ("--hsc-max-bad", 0.01, "The fraction of rows whose captures may be damaged: passed over up to that."),
    ("--hsc-wait", 120.0, "Seconds to wait for a capture or a restarting sidecar."),
)
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.5, 10.0
_T = TypeVar("_T")


@dataclass(frozen=True)
class RunSettings:
    """Where captures come from and which ones; plain data, so that spawned workers get it too."""

    data_path: str
    """The Arrow data set whose rows are asked for."""
    model: str
    """As the engine names it in its captures."""
    layers: TargetLayers
    captured: tuple[int, ...]
    """The layer ids the engine captured, ascending; part of the content hash."""
    url: str = DEFAULT_SIDECAR
    revision: str = ""
    lora: str = ""
    weights_id: str | None = None
    """The first digits of whose weights; None: the engine's that sends, else those of all captures."""
    wait_s: float = 120.0
    """How long a capture may take to be final, and the sidecar to come back."""
    max_bad: float = 0.01
    """The fraction of rows whose captures may all be damaged before that ends the run."""
    keep: bool = False
    """Generated captures stay in the store, and are found in the next epoch."""


class SidecarTransfer(HiddenStatesTransfer):  # type: ignore[misc]
    """Samples from one sidecar. Travels pickled to data-loading workers, each of which opens its own connection."""

    def __init__(self, settings: RunSettings) -> None:
        self.settings = settings
        self._client: Client | None = None
        self._passed = PassedOver(settings.max_bad)
        self._rows: Any = None
        self._content: Content | None = None
        self._hinted = self._hinted_weights = False

    def __getstate__(self) -> tuple[RunSettings, PassedOver]:
        return self.settings, self._passed

    def __setstate__(self, state: tuple[RunSettings, PassedOver]) -> None:
        self.__init__(state[0])  # type: ignore[misc]
        self._passed = state[1]

    def setup(self) -> None:
        """Opens the connection; called again, does nothing."""
        if self._client is None:
            self._client = Client(self.settings.url)

    def close(self) -> None:
        """Closes the connection; the trainer leaves that to the end of its processes."""
        if self._client is not None:
            self._client.close()
            self._client = None

    def get_cached(self, file_idx: int) -> dict[str, torch.Tensor] | None:
        """The sample of row `file_idx`: `hidden_states` `[T, L, H]`, `token_ids` `[T]`; None where none is stored.

        Where its newest capture is gone or damaged, an older one of the same content is taken. A row of which none is
        good is one that is not stored, counted and named; CaptureError lists them where they are more than `max_bad`
        of the data set. Raises SettingsError where the capture is not what this run reads.
        """
        digest, bad = self.content_hash(file_idx), None
        for record in self._patiently(lambda client: client.find(content_hash=digest, state=CaptureState.READY)):
            try:
                return self._sample(record)
            except CaptureExpired:
                continue
            except (ShardError, StoreError) as error:
                bad = bad or Passed(f"row {file_idx}", record.capture_id, str(error))
        if bad is None:
            self._hint(file_idx)
        else:
            self._passed.note(bad, len(self._rows))
        return None

    def get_generated(self, hs_transfer_params: dict[str, Any]) -> dict[str, torch.Tensor]:
        """The sample that the engine has just computed, once it is final.

        Raises CaptureFailed, CaptureQuarantined, CapturePending or SidecarUnreachable, on which the trainer asks the
        engine again, and what `get_cached` raises.
        """
        handle = hs_transfer_params.get("handle") or hs_transfer_params.get("hidden_states_path") or ""
        capture_id = hs_transfer_params.get("capture_id") or capture_id_of(handle)
        wait = self.settings.wait_s
        try:
            return self._sample(self._patiently(lambda client: client.wait(capture_id, wait)))
        except CaptureNotFound as error:
            raise SettingsError(
                f"the sidecar at {self.settings.url} has not heard of capture {capture_id} within {wait:g} s, the "
                f"engine's answer says {handle}: name this engine's sidecar in --sidecar"
            ) from error

    def delete(self, handle: str) -> None:
        """The trainer has the sample in memory: its capture is removed, unless captures are to be kept."""
        capture_id = capture_id_of(handle)
        if not self.settings.keep:
            self._patiently(lambda client: client.delete(capture_id))

    def content_hash(self, row: int) -> str:
        """What a capture of this row's tokens is found by."""
        return self.content.hash_of(self._token_ids(row))

    @property
    def content(self) -> Content:
        """What this run trains on, apart from tokens: of whose weights is asked of the sidecar, once.

        They are those of the engine that sends to it, or of the captures that it holds. Raises SettingsError where
        these are of several weights and `weights_id` does not say which.
        """
        if self._content is None:
            found = self._patiently(self._whose)
            if found is None:
                return self._names  # nothing is stored and nobody sends yet
            self._content = found
        return self._content

    @property
    def _names(self) -> Content:
        settings = self.settings
        return Content(settings.model, settings.revision, settings.captured, settings.lora)

    def _whose(self, client: Client) -> Content | None:
        settings = self.settings
        wanted = settings.weights_id
        sending = {each.weights_id for each in client.producers() if each.model == settings.model}
        if wanted is None and len(sending) == 1:
            wanted = sending.pop()
        held = client.weights(model=settings.model)
        if not held:
            return None
        try:
            chosen = choose_weights(held, wanted)
        except SettingsError as error:
            if settings.weights_id is None and wanted is not None:
                chosen = wanted  # the engine's, of which nothing is stored yet
            else:
                raise SettingsError(f"{error}, with --hsc-weights-id") from error
        others = ", ".join(str(each) for each in held if each.weights_id != chosen)
        if others and not self._hinted_weights:
            self._hinted_weights = True
            log.warning("captures of other weights than %s are not taken: %s", chosen[:12] or "unknown ones", others)
        for record in client.captures(model=settings.model, weights_id=chosen, state=CaptureState.READY):
            if (record.layer_ids, record.lora) == (settings.captured, settings.lora):
                return record.content
        return None

    def _token_ids(self, row: int) -> bytes:
        if self._rows is None:
            from datasets import load_from_disk

            self._rows = load_from_disk(self.settings.data_path).with_format("numpy", columns=["input_ids"])
        return bytes(self._rows[row]["input_ids"].astype("<i8").tobytes())

    def _sample(self, record: CaptureRecord) -> dict[str, torch.Tensor]:
        settings, name = self.settings, f"capture {record.capture_id}"
        if record.state is CaptureState.READY:
            _check_model(name, record.model, settings.model)
            _check_weights(name, record.weights_id, self.content.weights_id)
            settings.layers.check(name, record.layer_ids, record.num_layers)
        layers = None if record.layer_ids == settings.layers.captured else settings.layers.captured
        capture = self._patiently(lambda client: client.fetch(record, layers=layers))
        _check_norm(name, capture)
        return {"hidden_states": settings.layers.of(capture), "token_ids": capture.token_ids}

    def _patiently(self, ask: Callable[[Client], _T]) -> _T:
        """A call to a sidecar that may be restarting."""
        deadline, pause = time.monotonic() + self.settings.wait_s, _FIRST_PAUSE_S
        while True:
            self.setup()
            try:
                return ask(self._client)  # type: ignore[arg-type]
            except SidecarUnreachable as error:
                if time.monotonic() + pause > deadline:
                    raise
                log.warning("%s; trying again in %g s", error, pause)
            time.sleep(pause)
            pause = min(2 * pause, _LAST_PAUSE_S)

    def _hint(self, row: int) -> None:
        """Once, at the first row that is not stored: what is stored instead, if it looks like a mistaken option."""
        if self._hinted:
            return
        self._hinted = True
        settings = self.settings
        found = self._patiently(lambda client: next(client.captures(page_size=1, state=CaptureState.READY), None))
        if found is None:
            log.info("the sidecar at %s holds no captures yet", settings.url)
            return
        wanted = (settings.model, settings.revision, settings.captured, settings.lora)
        if (found.model, found.model_revision, found.layer_ids, found.lora) != wanted:
            log.warning(
                "row %d is not stored under model %r, revision %r, layers %s, adapter %r; the newest capture at %s has "
                "%r, %r, %s, %r: set --hsc-model, --hsc-revision, --hsc-layers or --hsc-lora if that is what you want",
                *(row, settings.model, settings.revision, list(settings.captured), settings.lora, settings.url),
                *(found.model, found.model_revision, list(found.layer_ids), found.lora),
            )


class SidecarBackend(HiddenStatesBackend):  # type: ignore[misc]
    """What speculators asks of a backend; its parser takes plain typed options only."""

    @staticmethod
    def add_train_args(parser: argparse.ArgumentParser) -> None:
        """The options of `speculators train`."""
        _add_sidecar(parser)
        for name, default, help in _TRAIN_OPTIONS:
            parser.add_argument(name, type=type(default), default=default, help=help)
        parser.add_argument(
            "--hsc-keep",
            type=str,
            choices=["no", "yes"],
            default="no",
            help="Keep what was generated for later epochs.",
        )

    @staticmethod
    def add_launch_args(parser: argparse.ArgumentParser) -> None:
        """The options of their launch script."""
        _add_sidecar(parser)

    @staticmethod
    def from_train_args(args: argparse.Namespace, data_path: str) -> SidecarTransfer:
        """The transfer of a run; raises SettingsError."""
        layers = target_layers_of(args)
        captured = layers.captured
        if args.hsc_layers:
            captured = parse_layer_ids(args.hsc_layers, layers.last, option="--hsc-layers")
        layers.check("an engine started with --hsc-layers", captured, layers.last)
        return SidecarTransfer(
            RunSettings(
                data_path=data_path,
                model=args.hsc_model or args.verifier_name_or_path,
                layers=layers,
                captured=captured,
                url=_sidecar(args),
                revision=args.hsc_revision,
                lora=args.hsc_lora,
                weights_id=args.hsc_weights_id or None,
                wait_s=args.hsc_wait,
                max_bad=args.hsc_max_bad,
                keep=args.hsc_keep == "yes",
            )
        )

    @staticmethod
    def build_kv_transfer_config(args: argparse.Namespace) -> dict[str, Any]:
        """`--kv-transfer-config` of an engine that streams to the sidecar."""
        return {
            "kv_connector": "HiddenStatesConnector",
            "kv_connector_module_path": "hsconnector.connector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"sidecar": _sidecar(args)},
        }


def register() -> None:
    """Makes the backend known to speculators; before `speculators.train.config.resolution` is imported."""
    if HiddenStatesBackend.registry.get(NAME) is not SidecarBackend:
        HiddenStatesBackend.register(NAME)(SidecarBackend)


def trainer_sample(sample: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A sample of `hsconnector.dataset`, read with the layers of a run, as the trainer's own data set gives it.

    `hidden_states` `[T, (L - 1) * H]`, `verifier_last_hidden_states` `[T, H]` (the last slot), `input_ids` and
    `loss_mask` `[T]`: what `hsconnector.dataset.Pack` puts together as the trainer's `CollateFn` does. That one also
    counts `error_records` in a batch, samples that were not there: a data set of ours leaves them out.
    """
    states = sample["hidden_states"]
    return {
        "hidden_states": states[:, :-1].flatten(1),
        "input_ids": sample["token_ids"],
        "verifier_last_hidden_states": states[:, -1],
        "loss_mask": sample["loss_mask"],
    }


def load_trainer() -> Callable[[Sequence[str]], None]:
    """What runs `speculators train` with these arguments, our backend among its own; raises ModuleNotFoundError."""
    register()
    from speculators.train.cli import main
    from speculators.train.config import TrainConfig

    return lambda arguments: main(TrainConfig.resolve(list(arguments)))


def capture_id_of(handle: str) -> str:
    """The capture that a handle, or the path of its shard, names; raises SettingsError."""
    name = PurePosixPath(urlsplit(handle).path).name.removesuffix(".safetensors")
    if not is_capture_id(name):
        raise SettingsError(f"{handle!r} is no handle of hsconnector: does the engine use its connector?")
    return name


def _add_sidecar(parser: argparse.ArgumentParser) -> None:
    """`--sidecar`, and its name in earlier versions, which no help shows."""
    parser.add_argument(
        "--sidecar",
        type=str,
        default="",
        help=f"Where `hsconnector serve` listens, http://... or unix:///...; else HSC_SIDECAR, else {DEFAULT_SIDECAR}.",
    )
    parser.add_argument("--hsc-url", type=str, default="", help=argparse.SUPPRESS)


def _sidecar(args: argparse.Namespace) -> str:
    return str(args.sidecar or args.hsc_url or default_sidecar())


def _check_model(name: str, found: str, wanted: str) -> None:
    if found != wanted:
        raise SettingsError(
            f"{name} is of model {found!r}, this run is for {wanted!r}: if both are one checkpoint, add "
            f"--hsc-model {found}"
        )


def _check_weights(name: str, found: str, wanted: str) -> None:
    if found != wanted:
        raise SettingsError(
            f"{name} is of weights {found[:12] or 'unknown'}, this run trains on {wanted[:12] or 'unknown ones'}: the "
            "engine's weights have changed, or another engine has answered"
        )


def _check_norm(name: str, capture: Capture) -> None:
    norm = capture.metadata.get("last_layer_norm")
    if norm != "pre":
        raise SettingsError(
            f"{name} says last_layer_norm {norm!r}; the trainer applies the final norm itself: needs 'pre'"
        )
