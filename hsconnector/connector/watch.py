"""Whether the engine's weights are still those that were loaded: its parameters, looked at in memory.

vLLM tells a connector of an update only where its caches are reset with it (`/pause` with `clear_cache`, `/sleep`,
`/reset_prefix_cache?reset_external=true`). `reload_weights`, `/update_weights` without a pause, `apply_model` and
whatever else a worker runs between two steps write into the parameters without a word: mostly through `.data`, which
leaves PyTorch's own counter of changes as it is. So the values themselves are looked at.

`glance` compares 256 bytes of every parameter, whether it lies where it lay, and its counter: a microsecond each, cheap
enough for every step in which a capture begins or ends, which is enough: what changes in between is seen when the
capture ends. On a GPU the comparison is queued behind the forward before it and nobody waits. `fingerprint`
reads everything, and serves where something has changed or may have.

Not seen: an update that leaves every sampled byte as it was (a patch of few elements, unless the caches are reset with
it); other ranks' shards and pipeline stages, if nothing changes on this one; experts, where the engine moves them
between ranks itself (`enable_eplb`); buffers; a parameter that exists as a kernel's own packed copy only, where that
copy is written in place (on a CPU, vLLM packs linear layers; a new copy is seen).
"""

from __future__ import annotations

import hashlib
import inspect
import secrets
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = ["Glance", "Watch", "running_model"]

SAMPLE_BYTES = 256
PIECE = 1 << 20
"""Words of 8 bytes that a fingerprint takes at a time: 16 MiB of scratch memory on the model's device."""
_ODD = 0x2545F4914F6CDD1D


def running_model() -> torch.nn.Module | None:
    """The model of the runner that is calling, wherever it stands among the callers.

    No hook of a connector is given the model, and nothing global knows it; every runner has `get_model`.
    """
    frame = inspect.currentframe()
    while frame is not None:
        get_model = getattr(frame.f_locals.get("self"), "get_model", None)
        model = get_model() if callable(get_model) else None
        if isinstance(model, torch.nn.Module):
            return model
        frame = frame.f_back
    return None


class Glance:
    """One comparison, that may still be under way on the device."""

    def __init__(self, differs: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._differs = differs
        if differs.device.type == "cuda":
            self._differs = torch.empty((), dtype=torch.bool, pin_memory=True).copy_(differs, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def done(self) -> bool:
        """Whether `changed` needs no waiting."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    @property
    def changed(self) -> bool:
        """Whether the weights were others than at the last fingerprint, or may be; waits for the device."""
        if self._event is not None:
            self._event.synchronize()
        return bool(self._differs)


class Watch:
    """The parameters of a model in this process. `skip` is part of the names of those that move by themselves."""

    def __init__(self, model: torch.nn.Module, skip: str = "") -> None:
        self._homes = [
            (module._parameters, name)
            for prefix, module in model.named_modules()
            for name in module._parameters
            if not skip or skip not in f"{prefix}.{name}"
        ]
        self._packed = [module for module in model.modules() if hasattr(module, "cpu_linear")]
        self._salt = ""
        self._remember()

    def glance(self) -> Glance:
        """Begins to compare; the answer is of the weights that the device's queue has by now."""
        if self._moved() or self._repacked():
            return Glance(torch.tensor(True))
        return Glance((torch.cat(self._views) != self._seen).any() if self._views else torch.tensor(False))

    def fingerprint(self) -> str:
        """SHA-256 (hex) of every parameter on this rank; what `glance` compares with is taken anew."""
        if self._repacked():
            self._salt = secrets.token_hex(16)
        self._remember()
        digest = hashlib.sha256(self._salt.encode() + self._seen.cpu().numpy().tobytes())
        for data in self._bytes():
            digest.update(f"{data.numel()} {_checksum(data)}\n".encode())
        return digest.hexdigest()

    def _remember(self) -> None:
        self._places = [(*place, place[3].data_ptr(), _version(place[3])) for place in self._tensors()]
        self._copies = [weakref.ref(module.cpu_linear) for module in self._packed]
        self._views = _samples(list(self._bytes()))
        self._seen = torch.cat(self._views) if self._views else torch.empty(0, dtype=torch.uint8)

    def _moved(self) -> bool:
        """Whether a parameter is another object, lies elsewhere, or was changed by PyTorch's own count."""
        return any(
            home.get(name) is not parameter or tensor.data_ptr() != place or _version(tensor) != version
            for home, name, parameter, tensor, place, version in self._places
        )

    def _repacked(self) -> bool:
        return any(old() is not module.cpu_linear for module, old in zip(self._packed, self._copies, strict=True))

    def _tensors(self) -> Iterator[tuple[dict[str, Any], str, torch.Tensor, torch.Tensor]]:
        """Every parameter with the dictionary that it is in and its name there, and each tensor that it is made of."""
        for home, name in self._homes:
            parameter = home.get(name)
            if parameter is not None:
                yield from ((home, name, parameter, tensor) for tensor in _plain(parameter))

    def _bytes(self) -> Iterator[torch.Tensor]:
        """The bytes of each parameter, `[n]` uint8, once where several share them."""
        seen: set[int] = set()
        for _, _, _, tensor in self._tensors():
            if tensor.numel() and tensor.data_ptr() not in seen:
                seen.add(tensor.data_ptr())
                storage = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
                yield storage[tensor.storage_offset() * tensor.element_size() :][: tensor.nbytes]


def _plain(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors that hold the bytes: quantised ones of torchao are made of several."""
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _plain(getattr(tensor, name))
    elif not tensor.is_meta:
        yield tensor


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _samples(parameters: list[torch.Tensor]) -> list[torch.Tensor]:
    """Views of the middle of each; of those on another device than the first (offloaded ones) none."""
    here = [data for data in parameters if data.device == parameters[0].device]
    return [data[max(0, data.numel() - SAMPLE_BYTES) // 2 :][:SAMPLE_BYTES] for data in here]


def _checksum(data: torch.Tensor) -> str:
    """A sum of all words, each weighted by its place, so that none can move or change unseen but by a rare chance."""
    data = data.clone() if data.storage_offset() % 8 else data
    whole = data.numel() // 8 * 8
    words, rest = data[:whole].view(torch.int64), data[whole:]
    weights = torch.arange(1, min(PIECE, words.numel()) + 1, device=data.device) * _ODD
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    for start in range(0, words.numel(), PIECE):
        piece = words[start : start + PIECE]
        total = total * _ODD + (piece * weights[: piece.numel()]).sum()
    return f"{int(total)} {rest.tolist()}"
