from __future__ import annotations

from pathlib import Path

import pytest

from hsconnector.errors import SettingsError
from server.settings import OnUnsound, load


def test_defaults() -> None:
    settings = load()
    assert (settings.host, settings.port, settings.heartbeat_s, settings.max_payload_bytes) == (
        "127.0.0.1",
        8190,
        15,
        64 << 20,
    )
    assert settings.store.name == "store"
    assert settings.store.parent.name == "hsconnector"
    assert settings.keep_alive_s >= 75
    assert (settings.on_unsound, settings.key(), settings.access_log) == (OnUnsound.QUARANTINE, None, False)


def test_command_line_over_environment_over_file_over_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "sidecar.toml"
    config.write_text('port = 1\nheartbeat_s = 1.5\nhost = "::1"\nquota = "5GB"\n')
    monkeypatch.setenv("HSC_PORT", "2")
    monkeypatch.setenv("HSC_HEARTBEAT_S", "2.5")
    monkeypatch.setenv("HSC_SOMETHING_OF_OTHERS", "x")
    settings = load(config, port=3, host=None)
    assert (settings.port, settings.heartbeat_s, settings.host, settings.quota) == (3, 2.5, "::1", 5_000_000_000)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("porr = 1", "porr: no such setting; there are access_log,"),
        ('port = "x"', "port = 'x':"),
        ("port = 99999", "port = 99999:"),
        ("heartbeat_s = 0", "heartbeat_s = 0:"),
        ('on_unsound = "panic"', "on_unsound = 'panic':"),
        ('quota = "much"', "quota = 'much':"),
        ('public_url = "host:1"', "must start with http"),
        ("tcp = false", "nothing to listen on"),
        ("port = ", "is not TOML"),
    ],
)
def test_a_bad_file_is_one_line(tmp_path: Path, text: str, words: str) -> None:
    config = tmp_path / "sidecar.toml"
    config.write_text(text)
    with pytest.raises(SettingsError) as refused:
        load(config)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="is not a file"):
        load(tmp_path / "none.toml")


def test_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "key"
    file.write_text(" from-file \n")
    assert load(api_key="a").ingest_key() == "a"
    assert load(api_key="a", ingest_api_key="b").ingest_key() == "b"
    assert load(api_key_file=file).key() == "from-file"
    monkeypatch.setenv("HSC_API_KEY", "from-environment")
    assert load().key() == "from-environment"
    with pytest.raises(SettingsError, match="both given"):
        load(api_key_file=file).key()
    with pytest.raises(SettingsError, match="cannot be read"):
        load(ingest_api_key_file=tmp_path / "none").ingest_key()
    file.write_text("\n")
    with pytest.raises(SettingsError, match="is empty"):
        load(ingest_api_key_file=file).ingest_key()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org"])
def test_beyond_loopback_needs_a_key(host: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="refusing to listen on"):
        load(host=host).check_exposure()
    load(host=host, api_key="k").check_exposure()
    load(host=host, insecure=True).check_exposure()
    load(host=host, tcp=False, uds=tmp_path / "s").check_exposure()
    load(host="127.0.0.1").check_exposure()


def test_settings_are_frozen() -> None:
    settings = load()
    with pytest.raises(ValueError, match="frozen"):
        settings.port = 1
