"""The connector's settings, `kv_connector_extra_config`, and a request's own in `kv_transfer_params`; both strict."""

from __future__ import annotations

import difflib
import os
import zlib
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import SplitResult, urlsplit

import msgspec
from msgspec import Meta

from hsconnector.capture.protocol import MAX_TEXT_BYTES, MAX_TEXTS_BYTES, FailReason, RowsKind
from hsconnector.client.address import DEFAULT_SIDECAR
from hsconnector.connector.tracker import Wish
from hsconnector.errors import SettingsError

__all__ = ["REQUEST_KEY", "ConnectorSettings", "RequestSettings", "parse_settings", "parse_wish"]

REQUEST_KEY = "hidden_states"
"""The key of `kv_transfer_params` that is ours; everything beside it belongs to other connectors."""
_Settings = TypeVar("_Settings", bound=msgspec.Struct)


class ConnectorSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`kv_connector_extra_config`, as `vllm serve --kv-transfer-config` carries it.

    Each setting's description, range and default are declared here and nowhere else; `hsconnector launch` makes its
    options of them.
    """

    sidecar: Annotated[
        str, Meta(description="Where the sidecar listens: `http://host:port` or `unix:///path/to/socket`.")
    ] = DEFAULT_SIDECAR
    api_key_env: Annotated[
        str, Meta(description="The environment variable that holds the sidecar's ingest key; unset or empty: no key.")
    ] = "HSC_API_KEY"
    public_url: Annotated[
        str, Meta(description="What handles start with, as clients reach the sidecar; by default its own URL.")
    ] = ""
    transport: Annotated[
        Literal["auto", "shm", "http"],
        Meta(
            description="How rows reach the sidecar: `auto` uses shared memory where the sidecar can open it, `shm` "
            "insists on it, `http` never tries."
        ),
    ] = "auto"
    shm_dir: Annotated[
        str,
        Meta(description="Where the shared staging file is created; the sidecar's `--shm-dir` must be the same place."),
    ] = "/dev/shm"
    ring_bytes: Annotated[
        int,
        Meta(description="Staging memory, in bytes; below 64 MiB throughput suffers.", ge=1 << 16, le=1 << 40),
    ] = 128 << 20
    capture: Annotated[
        Literal["all", "opt_in"],
        Meta(description="Capture every request, or only those that ask for it with `capture: true`."),
    ] = "all"
    sample_rate: Annotated[
        float,
        Meta(description="The share of requests to capture, of those that do not ask themselves.", ge=0, le=1),
    ] = 1.0
    on_overflow: Annotated[
        Literal["wait", "drop"],
        Meta(
            description="When staging memory is full: leave rows in the KV cache for a later step, or give the "
            "capture up."
        ),
    ] = "wait"
    stall_timeout_s: Annotated[
        float,
        Meta(
            description="How long a finished request may hold its blocks without a row of it moving, in seconds.",
            ge=0,
            le=3600,
        ),
    ] = 30.0
    include_output_tokens: Annotated[
        bool, Meta(description="Capture the rows of prompt and output; a request can say otherwise.")
    ] = False
    file_backend: Annotated[
        bool,
        Meta(
            description="Serve speculators' stock `file` backend on the same host: answers name the file, a lock file "
            "says when it is there. Quarantined captures have no such file."
        ),
    ] = False
    store_dir: Annotated[
        str,
        Meta(
            description="For speculators' stock `file` backend: the sidecar's `--store` as engine and trainer see it, "
            "an absolute path."
        ),
    ] = ""

    @property
    def handle_base(self) -> str:
        """What a handle starts with."""
        return (self.public_url or self.sidecar).rstrip("/")

    @property
    def api_key(self) -> str:
        """The ingest key from the environment, or an empty text."""
        return os.environ.get(self.api_key_env, "").strip() if self.api_key_env else ""


class RequestSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`kv_transfer_params["hidden_states"]` of one request."""

    capture: bool | None = None
    dataset: str = ""
    sample_id: str = ""
    tags: dict[str, str] = {}
    include_output_tokens: bool | None = None
    expected_content_hash: str = ""


def parse_settings(extra: Mapping[str, Any]) -> ConnectorSettings:
    """The connector's settings; raises `SettingsError` naming the key, the value and the nearest known key."""
    settings = _convert(extra, ConnectorSettings, "kv_connector_extra_config")
    _check_addresses(settings)
    _check_file_backend(settings)
    return settings


def parse_wish(params: Mapping[str, Any] | None, settings: ConnectorSettings, request_id: str) -> Wish:
    """What one request is to get; a bad value becomes the wish's problem, never an exception."""
    asked = (params or {}).get(REQUEST_KEY)
    if asked is None:
        asked = {}
    if not isinstance(asked, Mapping):
        return _bad_request(f"{REQUEST_KEY} must be an object, got {type(asked).__name__}", {})
    try:
        request = _convert(asked, RequestSettings, REQUEST_KEY)
        _check_texts(request)
    except (SettingsError, RecursionError) as error:
        return _bad_request(str(error), asked)
    if not _wanted(request, settings, request_id):
        return Wish(capture=False)
    with_output = settings.include_output_tokens
    if request.include_output_tokens is not None:
        with_output = request.include_output_tokens
    return Wish(
        rows=RowsKind.PROMPT_AND_OUTPUT if with_output else RowsKind.PROMPT,
        dataset=request.dataset,
        sample_id=request.sample_id,
        tags=dict(request.tags),
        expected_content_hash=request.expected_content_hash,
    )


def _convert(given: Mapping[Any, Any], kind: type[_Settings], where: str) -> _Settings:
    """Value by value, so that the one that is wrong can be named; raises `SettingsError`."""
    types = {field.name: field.type for field in msgspec.structs.fields(kind)}
    values = {}
    for key, value in given.items():
        name, got = str(key)[:80], repr(value)[:200]
        if key not in types:
            raise SettingsError(f"{where} has no {name!r}{_nearest(name, list(types))} (got {got})")
        try:
            values[key] = msgspec.convert(value, types[key])
        except msgspec.ValidationError as error:
            about = "".join(f" ({meta.description})" for meta in getattr(types[key], "__metadata__", ()))
            raise SettingsError(f"{where}[{name!r}] = {got}: {error}{about}") from error
    return kind(**values)


def _check_addresses(settings: ConnectorSettings) -> None:
    address = _split("sidecar", settings.sidecar)
    if address.scheme == "unix":
        if not address.path:
            raise SettingsError(f"sidecar {settings.sidecar!r} names no socket; write unix:///path/to/socket")
        if not settings.public_url:
            raise SettingsError(
                "a sidecar on a Unix socket needs public_url as well: clients fetch captures from it over HTTP"
            )
    elif address.scheme not in ("http", "https") or not address.hostname or address.query or address.fragment:
        raise SettingsError(f"sidecar is http://host:port or unix:///path/to/socket, got {settings.sidecar!r}")
    if settings.public_url:
        public = _split("public_url", settings.public_url)
        if public.scheme not in ("http", "https") or not public.hostname:
            raise SettingsError(f"public_url starts with http:// or https:// and a host, got {settings.public_url!r}")
    if not all(" " < character <= "~" for character in settings.api_key):
        raise SettingsError(f"the key in {settings.api_key_env} holds characters that no HTTP header can carry")


def _split(name: str, text: str) -> SplitResult:
    try:
        address = urlsplit(text)
        _ = address.port
    except ValueError as error:
        raise SettingsError(f"{name} {text!r} is no address: {error}") from error
    if not all(" " < character <= "~" for character in text):
        raise SettingsError(f"{name} {text!r} holds characters that no address has")
    return address


def _check_file_backend(settings: ConnectorSettings) -> None:
    if settings.file_backend and not os.path.isabs(settings.store_dir):
        raise SettingsError(
            "file_backend needs store_dir, the sidecar's --store as an absolute path on this host, "
            f"got {settings.store_dir!r}"
        )
    if settings.store_dir and not settings.file_backend:
        raise SettingsError(f"store_dir {settings.store_dir!r} is for file_backend, which is off; set it to true")


def _check_texts(request: RequestSettings) -> None:
    texts = {"dataset": request.dataset, "sample_id": request.sample_id}
    for key, value in request.tags.items():
        texts[f"tags[{key[:40]!r}]"] = value
        texts[f"tags key {key[:40]!r}"] = key
    for name, text in texts.items():
        if problem := _text_problem(text):
            raise SettingsError(f"{name} {problem}")
    total = sum(len(text.encode()) for text in texts.values())
    if total > MAX_TEXTS_BYTES:
        raise SettingsError(f"dataset, sample_id and tags have {total} bytes together, at most {MAX_TEXTS_BYTES}")
    _check_hash(request.expected_content_hash)


def _text_problem(text: str) -> str:
    size = len(text.encode("utf-8", "surrogatepass"))
    if size > MAX_TEXT_BYTES:
        return f"has {size} bytes, at most {MAX_TEXT_BYTES} are allowed"
    if any("\ud800" <= character <= "\udfff" for character in text):
        return "holds half a surrogate pair, which is no text"
    return ""


def _check_hash(text: str) -> None:
    if text and (len(text) != 64 or not set(text) <= set("0123456789abcdef")):
        raise SettingsError(f"expected_content_hash is 64 lower-case hex digits, got {text[:80]!r}")


def _wanted(request: RequestSettings, settings: ConnectorSettings, request_id: str) -> bool:
    if request.capture is not None:
        return request.capture
    if settings.capture == "opt_in":
        return False
    return zlib.crc32(request_id.encode("utf-8", "surrogatepass")) < settings.sample_rate * 2**32


def _bad_request(detail: str, asked: Mapping[str, Any]) -> Wish:
    """The capture fails; it can still be found by the names that it was given, where those are good."""
    dataset, sample_id = (_good_text(asked.get(key)) for key in ("dataset", "sample_id"))
    return Wish(dataset=dataset, sample_id=sample_id, problem=(FailReason.BAD_REQUEST, detail))


def _good_text(value: object) -> str:
    return value if isinstance(value, str) and not _text_problem(value) else ""


def _nearest(key: str, known: list[str]) -> str:
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.0)
    return f"; did you mean {close[0]!r}? Known: {', '.join(known)}" if close else f"; known: {', '.join(known)}"
