"""Single tensors of a checkpoint on disk, without loading the rest."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hsconnector.errors import SettingsError, UnsupportedError

__all__ = ["Checkpoint"]

_INDEX = "model.safetensors.index.json"
_WHOLE = "model.safetensors"


class Checkpoint:
    """A folder of safetensors files with `config.json`, or a hub name, of which only the asked files are fetched."""

    def __init__(self, model: str | os.PathLike[str], revision: str = "") -> None:
        self.name = os.fspath(model)
        self._revision = revision or None

    def file(self, name: str) -> Path:
        """A file of it on this disk; raises SettingsError."""
        found = self._find(name)
        if found is None:
            raise SettingsError(
                f"{self.name} has no {name} that can be found: give the model's own checkpoint folder with --model"
            )
        return found

    @functools.cached_property
    def text_config(self) -> Mapping[str, Any]:
        """`config.json`, or the part of it that is about the language model; `model_type` is always of that part."""
        config: dict[str, Any] = json.loads(self.file("config.json").read_text())
        text = config.get("text_config")
        if not isinstance(text, dict):
            return config
        return {"model_type": f"{config.get('model_type', '')}_text", **text}

    def setting(self, names: Sequence[str]) -> Any:
        """The first of these settings that there is, else what transformers takes; raises SettingsError."""
        for name in names:
            if self.text_config.get(name) is not None:
                return self.text_config[name]
        return self._default(names)

    def _default(self, names: Sequence[str]) -> Any:
        """What transformers takes where `config.json` leaves it out."""
        reason = ""
        try:
            from transformers import AutoConfig

            config = AutoConfig.for_model(str(self.text_config.get("model_type", "")))
            for name in names:
                if getattr(config, name, None) is not None:
                    return getattr(config, name)
        except (ImportError, ValueError) as error:
            reason = f": {error}"
        raise SettingsError(f"config.json of {self.name} has none of {', '.join(names)}{reason}")

    @functools.cached_property
    def tensors(self) -> Mapping[str, str]:
        """The file of each tensor, by the tensor's name."""
        if (index := self._find(_INDEX)) is not None:
            names: dict[str, str] = json.loads(index.read_text())["weight_map"]
            return names
        return dict.fromkeys(self._names(self.file(_WHOLE)), _WHOLE)

    def tensor(self, name: str) -> Any:
        """One tensor as stored, on the CPU."""
        from safetensors import safe_open

        with safe_open(self.file(self.tensors[name]), framework="pt") as file:
            return file.get_tensor(name)

    def _names(self, path: Path) -> list[str]:
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="pt") as file:
                return list(file.keys())
        except (SafetensorError, OSError) as error:
            raise SettingsError(f"{path} cannot be read as safetensors: {error}") from error

    def _find(self, name: str) -> Path | None:
        folder = Path(self.name)
        if folder.is_dir():
            return folder / name if (folder / name).is_file() else None
        if folder.is_absolute() or self.name.startswith("."):
            raise SettingsError(f"{self.name} is not a folder: give the model's own checkpoint with --model")
        return self._from_hub(name)

    def _from_hub(self, name: str) -> Path | None:
        try:
            from huggingface_hub import hf_hub_download
            from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError
        except ImportError as error:
            raise UnsupportedError(
                f"{self.name} is no folder, and without huggingface_hub no hub name can be found: "
                "give the model's checkpoint folder with --model"
            ) from error
        try:
            return Path(hf_hub_download(self.name, name, revision=self._revision))
        except EntryNotFoundError:
            return None
        except (HfHubHTTPError, HFValidationError, OSError) as error:
            reason = str(error).strip().split("\n")[0]
            raise SettingsError(
                f"{self.name} is neither a folder here nor to be had from the hub ({reason}): "
                "give the model's checkpoint folder with --model"
            ) from error
