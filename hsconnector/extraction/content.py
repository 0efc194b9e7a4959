"""Which content a run is after, and whether a capture is of it, whole and sound. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hsconnector.capture.content import Content
from hsconnector.capture.layers import choose_layers
from hsconnector.capture.protocol import CaptureState, FailReason, Producer, pack_token_ids
from hsconnector.capture.record import CaptureRecord
from hsconnector.errors import SettingsError, UnsupportedError
from hsconnector.prompts.prompt import Prompt

__all__ = ["CaptureUnfit", "choose_content", "judge"]

_FINAL_REASONS = frozenset({FailReason.BAD_REQUEST, FailReason.UNSUPPORTED_REQUEST, FailReason.LAYOUT})
"""Reasons for which the next attempt would fail as well."""


class CaptureUnfit(Exception):
    """A capture that is not what was asked for; `again` where another try may give it."""

    def __init__(self, message: str, *, again: bool) -> None:
        super().__init__(message)
        self.again = again


def choose_content(
    producers: Iterable[Producer], *, model: str, lora: str = "", layers: str = "", sidecar: str
) -> Content:
    """What an engine that runs `model` captures, by what its stream told the sidecar.

    `layers` is what `--layers` means to `launch`, or empty for whatever the engine captures.

    Raises UnsupportedError where no engine of that model sends to the sidecar, SettingsError where the layers are
    others than asked for or cannot be told.
    """
    streams = list(producers)
    found = {_content(stream, lora): stream.num_layers for stream in streams if stream.model == model}
    if not found:
        others = ", ".join(sorted({repr(stream.model) for stream in streams})) or "no engine at all"
        raise UnsupportedError(
            f"no engine of {model!r} sends to the sidecar at {sidecar}, which hears from {others}: start the engine "
            f"with `hsconnector launch {model} --sidecar {sidecar}`"
        )
    fitting = [content for content, depth in found.items() if _has_layers(content, layers, depth)]
    if not fitting:
        wanted = sorted({choose_layers(layers, depth).layer_ids for depth in found.values()})
        raise SettingsError(
            f"the engine of {model!r} captures layers {_layers(found)}, asked for are {_listed(wanted)}"
        )
    if len(fitting) > 1:
        raise SettingsError(
            f"several engines of {model!r} send to {sidecar}, with layers {_layers(fitting)}, revisions "
            f"{', '.join(repr(content.model_revision) for content in fitting)} and weights "
            f"{', '.join(_whose(content.weights_id) for content in fitting)}: say which with --layers, or give each a "
            "sidecar of its own"
        )
    return fitting[0]


def judge(record: CaptureRecord | None, prompt: Prompt, content: Content, *, waited_s: float) -> None:
    """Raises CaptureUnfit unless the capture is of the prompt and the content, sound, and ready or used up already."""
    if record is None:
        raise CaptureUnfit(f"the sidecar had not heard of its capture after {waited_s:g} s", again=True)
    name = f"its capture {record.capture_id}"
    if not record.final:
        raise CaptureUnfit(f"{name} was still receiving after {waited_s:g} s", again=True)
    if record.state is CaptureState.FAILED:
        detail = f" ({record.detail})" if record.detail else ""
        raise CaptureUnfit(f"{name} failed: {record.reason}{detail}", again=record.reason not in _FINAL_REASONS)
    if record.state is CaptureState.EXPIRED and not record.consumed:
        raise CaptureUnfit(f"{name} was removed: {record.detail}", again=True)
    if record.content_hash != content.hash_of(pack_token_ids(prompt.token_ids)):
        raise CaptureUnfit(f"{name} is of something else: {_difference(record, prompt, content)}", again=False)
    if record.state is CaptureState.QUARANTINED:
        raise CaptureUnfit(f"{name} is unsound: {record.findings}", again=True)
    if record.num_rows != len(prompt.token_ids):
        raise CaptureUnfit(f"{name} has {record.num_rows} rows for {len(prompt.token_ids)} tokens", again=False)


def _has_layers(content: Content, layers: str, num_layers: int) -> bool:
    return not layers or content.layer_ids == choose_layers(layers, num_layers).layer_ids


def _layers(contents: Iterable[Content]) -> str:
    return _listed(content.layer_ids for content in contents)


def _listed(layers: Iterable[Sequence[int]]) -> str:
    return " and ".join(str(list(ids)) for ids in layers)


def _content(stream: Producer, lora: str) -> Content:
    return Content(
        model=stream.model,
        model_revision=stream.model_revision,
        layer_ids=tuple(stream.layer_ids),
        lora=lora,
        weights_id=stream.weights_id,
        dtype=stream.dtype,
        kv_cache_dtype=stream.kv_cache_dtype,
    )


def _whose(weights_id: str) -> str:
    return weights_id[:12] or "unknown"


def _difference(record: CaptureRecord, prompt: Prompt, content: Content) -> str:
    pairs = [
        ("model", record.model, content.model),
        ("revision", record.model_revision, content.model_revision),
        ("weights", _whose(record.weights_id), _whose(content.weights_id)),
        ("dtype", record.dtype, content.dtype or record.dtype),
        ("KV-cache dtype", record.kv_cache_dtype, content.kv_cache_dtype),
        ("adapter's weights", _whose(record.lora_weights_id), _whose(content.lora_weights_id)),
        ("layers", list(record.layer_ids), list(content.layer_ids)),
        ("adapter", record.lora, content.lora),
        ("rows", record.num_rows, len(prompt.token_ids)),
    ]
    differing = [f"{what} {theirs!r} instead of {ours!r}" for what, theirs, ours in pairs if theirs != ours]
    return ", ".join(differing) or "its token ids are others than were sent"
