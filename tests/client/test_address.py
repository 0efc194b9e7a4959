from __future__ import annotations

import pytest

from hsconnector.client.address import Address, default_sidecar, origin_of, parse_address
from hsconnector.errors import SettingsError


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("http://10.0.0.1:8190/", Address("http://10.0.0.1:8190", "http://10.0.0.1:8190", None, False)),
        ("https://h/prefix", Address("https://h/prefix", "https://h/prefix", None, False)),
        ("unix:///run/hsc.sock", Address("unix:///run/hsc.sock", "http://localhost", "/run/hsc.sock")),
    ],
)
def test_what_an_address_is_made_of(text: str, parsed: Address) -> None:
    assert parse_address(text) == parsed


@pytest.mark.parametrize("text", ["127.0.0.1:8190", "ftp://host", "http://", "unix://", "/run/hsc.sock", ""])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match=r"http://host:port, https://… or unix:///path, not "):
        parse_address(text)


@pytest.mark.parametrize(
    ("host", "here"),
    [("localhost", True), ("127.8.9.1", True), ("[::1]", True), ("[::2]", False), ("localhost.example", False)],
)
def test_no_proxy_stands_before_this_host(host: str, here: bool) -> None:
    assert parse_address(f"http://{host}:8190").on_this_host is here


def test_origins_have_their_port() -> None:
    assert origin_of("HTTPS://Host/path?query") == "https://host:443"
    assert origin_of("http://[::1]:8190") == "http://::1:8190"
    for url in ("ftp://host", "http://host:port", "unix:///path"):
        with pytest.raises(SettingsError, match="is no http:// or https:// address"):
            origin_of(url)


def test_the_environment_names_the_sidecar(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HSC_SIDECAR", "HSC_URL"):
        monkeypatch.delenv(name, raising=False)
    assert default_sidecar() == "http://127.0.0.1:8190"
    monkeypatch.setenv("HSC_URL", "http://older:1")
    assert default_sidecar() == "http://older:1"
    monkeypatch.setenv("HSC_SIDECAR", "http://newer:1")
    assert default_sidecar() == "http://newer:1"
