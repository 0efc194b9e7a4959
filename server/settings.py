"""What the sidecar can be told, from the command line, `HSC_*`, a TOML file or the defaults, in that order."""

from __future__ import annotations

import enum
import tomllib
from pathlib import Path
from typing import Any

from platformdirs import user_data_path
from pydantic import ByteSize, Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from hsconnector.errors import SettingsError
from server.auth import is_loopback

__all__ = ["Evict", "OnUnsound", "Settings", "load"]


class OnUnsound(enum.StrEnum):
    """What becomes of a capture that is whole but unsound."""

    QUARANTINE = "quarantine"
    """Kept apart, listed, served only with `?quarantined=1`."""
    REJECT = "reject"
    """Failed as `unsound`; its bytes are removed."""
    WARN = "warn"
    """Ready; the verdict and the log say what is wrong."""


class Evict(enum.StrEnum):
    """What may be removed to make room for new captures; see `server.retention`."""

    NONE = "none"
    ACKED = "acked"
    """What a consumer has acknowledged."""
    OLDEST = "oldest"
    """That first, then whatever is oldest."""


class Settings(BaseSettings):
    """Every setting of the sidecar, frozen once parsed. What stands under each is also the help of its option."""

    model_config = SettingsConfigDict(
        env_prefix="HSC_", frozen=True, extra="forbid", validate_default=False, use_attribute_docstrings=True
    )

    store: Path = Field(default_factory=lambda: user_data_path("hsconnector") / "store")
    """The folder of the shards and their index, for one sidecar at a time; made if missing."""
    host: str = "127.0.0.1"
    """The address to listen on; beyond loopback a key is needed."""
    port: int = Field(8190, ge=0, le=65535)
    """The TCP port; 0 takes any free one, which the line printed at start names."""
    tcp: bool = True
    """Whether to listen on host and port at all; without them `uds` is needed."""
    uds: Path | None = None
    """A Unix socket to listen on as well."""
    public_url: str = ""
    """How clients reach this sidecar, the start of every handle; empty: the address that is listened on."""
    shm_dir: Path = Path("/dev/shm")
    """Where the memory that engines share with this sidecar is looked for, by bare name."""

    api_key: SecretStr | None = None
    """The key of readers; a command line shows it to every user of this host, HSC_API_KEY and a file do not."""
    api_key_file: Path | None = None
    """A file that holds the key of readers."""
    ingest_api_key: SecretStr | None = None
    """The key of engines, where it is not the key of readers."""
    ingest_api_key_file: Path | None = None
    """A file that holds the key of engines."""
    insecure: bool = False
    """Listen beyond loopback without a key."""

    durable: bool = False
    """Call fsync on each shard before it gets its name, and on the index with each batch."""
    on_unsound: OnUnsound = OnUnsound.QUARANTINE
    """A capture that is whole but unsound: keep it apart, fail it, or only warn."""
    quota: ByteSize | None = None
    """The most bytes of shards, such as 500GB, at which `evict` makes room; by default only the disk limits them."""
    evict: Evict = Evict.ACKED
    """What a full store removes for new captures: nothing, what a consumer acknowledged, or the oldest after that."""
    ttl_s: float | None = Field(None, gt=0, allow_inf_nan=False)
    """Seconds after which a final capture is removed; by default it stays."""
    forget_s: float = Field(2_592_000.0, ge=0, allow_inf_nan=False)
    """Seconds (30 days) after which the index forgets a failed or removed capture, and its routes say 404; 0: never."""
    full_wait_s: float = Field(10.0, ge=0, le=600)
    """Seconds for which a store without room lets engines wait before captures fail as `disk_full`; keep it below the
    connectors' `stall_timeout_s`."""
    sweep_s: float = Field(10.0, gt=0)
    """Seconds between two looks for what has outlived `ttl_s`."""
    heartbeat_s: float = Field(15.0, gt=0)
    """Seconds after which an engine that says nothing is lost, and its open captures fail."""
    max_payload_bytes: ByteSize = Field(ByteSize(64 << 20), ge=1 << 16)
    """The most bytes of rows in one call of an engine."""
    queue_batches: int = Field(64, ge=1)
    """Batches that may wait to be written; an engine that sends more waits for its answer."""
    max_wait_s: float = Field(300.0, ge=0)
    """The most seconds that `?wait=` waits."""
    keep_alive_s: int = Field(120, ge=75)
    """Idle seconds after which a connection is closed."""
    shutdown_s: int = Field(10, ge=1)
    """Seconds that answers in progress are given when the sidecar stops."""
    access_log: bool = False
    """Log every HTTP request."""

    @field_validator("store", "shm_dir", "uds")
    @classmethod
    def _absolute(cls, path: Path | None) -> Path | None:
        return path if path is None else path.expanduser().absolute()

    @field_validator("public_url")
    @classmethod
    def _is_url(cls, url: str) -> str:
        if url and not url.startswith(("http://", "https://")):
            raise ValueError("must start with http:// or https://")
        return url.rstrip("/")

    @model_validator(mode="after")
    def _has_an_address(self) -> Settings:
        if not self.tcp and self.uds is None:
            raise ValueError("nothing to listen on: give `uds`, or leave `tcp` on")
        return self

    def key(self) -> str | None:
        """The key of readers; raises `SettingsError` for an unreadable or empty file."""
        return _key("api_key", self.api_key, self.api_key_file)

    def ingest_key(self) -> str | None:
        """The key of producers."""
        return _key("ingest_api_key", self.ingest_api_key, self.ingest_api_key_file) or self.key()

    def reaches_beyond_loopback(self) -> bool:
        """Whether other hosts may be able to connect."""
        return self.tcp and not is_loopback(self.host)

    def check_exposure(self) -> None:
        """Refuses to be reachable from other hosts without a key."""
        if self.reaches_beyond_loopback() and not self.insecure and self.key() is None:
            raise SettingsError(
                f"refusing to listen on {self.host} without a key: "
                "give --api-key, listen on 127.0.0.1, or say --insecure"
            )


def _key(name: str, value: SecretStr | None, file: Path | None) -> str | None:
    if value is not None and file is not None:
        raise SettingsError(f"{name} and {name}_file are both given; keep one")
    if file is not None:
        try:
            text = file.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsError(f"{name}_file {file} cannot be read: {error}") from error
    else:
        text = "" if value is None else value.get_secret_value()
    if file is not None and not text:
        raise SettingsError(f"{name}_file {file} is empty")
    return text or None


def load(config: Path | None = None, **given: Any) -> Settings:
    """Settings from what was given, then the environment, then a TOML file; raises `SettingsError` in one line."""

    class Loaded(Settings, use_attribute_docstrings=False):
        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            if config is None:
                return init_settings, env_settings
            return init_settings, env_settings, TomlConfigSettingsSource(settings_cls, config)

    if config is not None and not config.is_file():
        raise SettingsError(f"--config {config} is not a file")
    try:
        loaded = Loaded(**{name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        raise SettingsError("; ".join(_sentence(problem) for problem in error.errors())) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"--config {config} is not TOML: {error}") from error
    return loaded


def _sentence(problem: Any) -> str:
    name = ".".join(str(part) for part in problem["loc"]) or "settings"
    if problem["type"] == "extra_forbidden":
        return f"{name}: no such setting; there are {', '.join(sorted(Settings.model_fields))}"
    if "key" in name:
        return f"{name}: {problem['msg']}"
    return f"{name} = {problem['input']!r}: {problem['msg']}" if problem["loc"] else str(problem["msg"])
