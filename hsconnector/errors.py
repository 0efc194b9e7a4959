"""Every exception that hsconnector raises on purpose.

HSConnectorError
├── SettingsError (ValueError)      a setting that is unknown, ill-typed or contradicts another
├── LayoutError (ValueError)        a KV-cache geometry that the engine refuses or that we cannot read exactly
├── UnsupportedError                an engine, model or request feature that extraction cannot serve
├── ProtocolError (ValueError)      bytes that are not a message of this protocol version
├── ShardError (ValueError)         bytes that are not a whole shard
├── CheckpointError (ValueError)    weight files that are not there, or are not what their names say
├── RingError                       staging memory that cannot be created, opened or trusted
├── IndexFault                      the index of a store cannot be read or written; carries the way out
│   └── BrokenIndex                 it is damaged: only a new one helps
├── StoreError (OSError)            the store cannot take or give bytes (full disk, no permission)
├── TransportError (ConnectionError)
│   ├── SidecarUnreachable          nobody answers, not in time, or that it cannot now
│   ├── SidecarRefused              an answer that says no: wrong key, protocol version, malformed batch
│   └── ProducerUnknown             the sidecar restarted or gave this stream up: open a new one
└── CaptureError                    one capture cannot be given; carries capture_id and reason
    ├── CaptureNotFound             never heard of
    ├── CapturePending              not final within the time waited
    ├── CaptureFailed               ended without a shard
    ├── CaptureQuarantined          whole but unsound; the verdict says where
    └── CaptureExpired              was here, was deleted or ran out of time
"""

from __future__ import annotations

__all__ = [
    "BrokenIndex",
    "CaptureError",
    "CaptureExpired",
    "CaptureFailed",
    "CaptureNotFound",
    "CapturePending",
    "CaptureQuarantined",
    "CheckpointError",
    "HSConnectorError",
    "IndexFault",
    "LayoutError",
    "ProducerUnknown",
    "ProtocolError",
    "RingError",
    "SettingsError",
    "ShardError",
    "SidecarRefused",
    "SidecarUnreachable",
    "StoreError",
    "TransportError",
    "UnsupportedError",
]


class HSConnectorError(Exception):
    """Root of the tree; catch this to catch everything of ours."""


class SettingsError(HSConnectorError, ValueError):
    """A setting that is unknown, ill-typed or contradicts another."""


class LayoutError(HSConnectorError, ValueError):
    """A KV-cache geometry that the engine refuses or that cannot be read exactly."""


class UnsupportedError(HSConnectorError):
    """An engine, model or request feature that extraction cannot serve."""


class ProtocolError(HSConnectorError, ValueError):
    """Bytes that are not a message of this protocol version."""


class ShardError(HSConnectorError, ValueError):
    """Bytes that are not a whole shard."""


class CheckpointError(HSConnectorError, ValueError):
    """Weight files that are not there, or are not what their names say."""


class RingError(HSConnectorError):
    """Staging memory that cannot be created, opened or trusted."""


class IndexFault(HSConnectorError):
    """The index of a store cannot be read or written; `way_out` is what a person can do, as an order."""

    def __init__(self, message: str, way_out: str = "see to that") -> None:
        super().__init__(message)
        self.way_out = way_out


class BrokenIndex(IndexFault):
    """The index is damaged, or does not hold what this version writes: only a new one helps."""


class StoreError(HSConnectorError, OSError):
    """The store cannot take or give bytes."""


class TransportError(HSConnectorError, ConnectionError):
    """The sidecar did not take a call."""


class SidecarUnreachable(TransportError):
    """Nobody answers at the sidecar's address, not in time, or that it cannot now (408, 429, most of the 500s)."""


class SidecarRefused(TransportError):
    """The sidecar answered, and said no; `kind` is the stable name of the reason, such as `lease_expired`."""

    def __init__(self, message: str, *, kind: str = "") -> None:
        super().__init__(message)
        self.kind = kind


class ProducerUnknown(TransportError):
    """The sidecar does not know this stream any more: open a new one."""


class CaptureError(HSConnectorError):
    """One capture cannot be given."""

    def __init__(self, message: str, *, capture_id: str = "", reason: str = "") -> None:
        super().__init__(message)
        self.capture_id = capture_id
        self.reason = reason


class CaptureNotFound(CaptureError):
    """No capture is known under this id."""


class CapturePending(CaptureError):
    """The capture was not final within the time waited."""


class CaptureFailed(CaptureError):
    """The capture ended without a shard."""


class CaptureQuarantined(CaptureError):
    """The capture is whole but unsound; its verdict says which rows and slots."""


class CaptureExpired(CaptureError):
    """The capture was here and is not any more."""
