from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hsconnector.capture.protocol import FailReason, RowsKind
from hsconnector.connector.settings import ConnectorSettings, parse_settings, parse_wish
from hsconnector.connector.tracker import Wish
from hsconnector.errors import SettingsError

DEFAULT = ConnectorSettings()


def refused(**settings: Any) -> str:
    with pytest.raises(SettingsError) as error:
        parse_settings(settings)
    text = str(error.value)
    assert "\n" not in text
    return text


class TestSettings:
    def test_defaults(self) -> None:
        assert parse_settings({}) == DEFAULT
        assert (DEFAULT.capture, DEFAULT.on_overflow, DEFAULT.transport) == ("all", "wait", "auto")

    def test_everything(self) -> None:
        given = {
            "sidecar": "unix:///run/hs.sock",
            "api_key_env": "KEY",
            "public_url": "https://hs.example/base/",
            "transport": "shm",
            "shm_dir": "/dev/shm/hs",
            "ring_bytes": 1 << 26,
            "capture": "opt_in",
            "sample_rate": 1,
            "on_overflow": "drop",
            "stall_timeout_s": 5,
            "include_output_tokens": True,
        }
        settings = parse_settings(given)
        assert msgspec.to_builtins(settings).items() >= given.items()
        assert settings.handle_base == "https://hs.example/base"

    @pytest.mark.parametrize(
        ("key", "nearest"),
        [
            ("side_car", "sidecar"),
            ("ringbytes", "ring_bytes"),
            ("shared_storage_path", "api_key_env"),
            ("RING_BYTES", ""),
            ("", ""),
            ("x" * 100_000, ""),
        ],
    )
    def test_an_unknown_key(self, key: str, nearest: str) -> None:
        text = refused(**{key: "/some/where"})
        assert "kv_connector_extra_config has no" in text
        assert "'/some/where'" in text
        assert "Known: sidecar, api_key_env" in text or "known: sidecar" in text
        assert len(text) < 1000
        if key in ("side_car", "ringbytes"):
            assert f"did you mean {nearest!r}?" in text

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("sidecar", 8190),
            ("sidecar", None),
            ("ring_bytes", "128MB"),
            ("ring_bytes", 1.5),
            ("ring_bytes", True),
            ("transport", "rdma"),
            ("capture", "some"),
            ("on_overflow", "block"),
            ("sample_rate", "half"),
            ("stall_timeout_s", [30]),
            ("include_output_tokens", "yes"),
            ("include_output_tokens", 1),
            ("public_url", {}),
            ("shm_dir", 5),
            ("api_key_env", 5),
        ],
    )
    def test_a_value_of_the_wrong_kind(self, key: str, value: object) -> None:
        text = refused(**{key: value})
        assert key in text
        assert repr(value) in text

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("sample_rate", -0.1),
            ("sample_rate", 1.1),
            ("sample_rate", math.nan),
            ("ring_bytes", 0),
            ("ring_bytes", -1),
            ("ring_bytes", 65535),
            ("ring_bytes", 1 << 50),
            ("ring_bytes", 1 << 62),
            ("stall_timeout_s", -1),
            ("stall_timeout_s", 1e9),
            ("stall_timeout_s", math.nan),
            ("stall_timeout_s", math.inf),
        ],
    )
    def test_a_value_out_of_range(self, key: str, value: float) -> None:
        text = refused(**{key: value})
        assert key in text
        assert str(value) in text

    @pytest.mark.parametrize(
        "address",
        ["", "localhost:8190", "127.0.0.1", "ftp://host", "http://", "http://:80", "http://[::1", "http://h:99999",
         "http://h:x", "http://h/?a=b", "http://h/#x", "http://h\n:80", "http://hö:80", "unix://", "//host"],
    )  # fmt: skip
    def test_no_address(self, address: str) -> None:
        assert "sidecar" in refused(sidecar=address)

    @pytest.mark.parametrize("address", ["http://127.0.0.1:8190", "https://[::1]:1", "http://h", "http://h/base/"])
    def test_addresses(self, address: str) -> None:
        assert parse_settings({"sidecar": address}).handle_base == address.rstrip("/")

    @pytest.mark.parametrize("url", ["host:80", "unix:///x", "http://", "http://[::1", "https://h\r\nx: y"])
    def test_no_public_url(self, url: str) -> None:
        assert "public_url" in refused(public_url=url)

    def test_a_socket_needs_a_public_url(self) -> None:
        assert "needs public_url" in refused(sidecar="unix:///run/hs.sock")

    def test_the_key_comes_from_the_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("MINE", "  secret\n")
        assert parse_settings({"api_key_env": "MINE"}).api_key == "secret"
        monkeypatch.delenv("MINE")
        assert parse_settings({"api_key_env": "MINE"}).api_key == ""
        assert parse_settings({"api_key_env": ""}).api_key == ""

    def test_a_key_that_no_header_can_carry(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for key in ("two\nlines", "schlüssel", "a\0b".replace("\0", "\x01")):
            monkeypatch.setenv("MINE", key)
            text = refused(api_key_env="MINE")
            assert "MINE" in text
            assert key not in text


def wish(asked: Any, request_id: str = "r", **settings: Any) -> Wish:
    return parse_wish({"hidden_states": asked}, msgspec.structs.replace(DEFAULT, **settings), request_id)


def problem(asked: Any) -> str:
    found = wish(asked).problem
    assert found is not None
    assert found[0] is FailReason.BAD_REQUEST
    found[1].encode()
    assert len(found[1]) < 1000
    return found[1]


class TestWish:
    @pytest.mark.parametrize("params", [None, {}, {"do_remote_decode": True}, {"hidden_states": None}])
    def test_nothing_asked(self, params: Any) -> None:
        assert parse_wish(params, DEFAULT, "r") == Wish()

    def test_everything_asked(self) -> None:
        asked = {
            "capture": True,
            "dataset": "d" * 256,
            "sample_id": "ünï",
            "tags": {"k": "v"},
            "include_output_tokens": True,
            "expected_content_hash": "0" * 64,
        }
        assert wish(asked) == Wish(
            rows=RowsKind.PROMPT_AND_OUTPUT,
            dataset="d" * 256,
            sample_id="ünï",
            tags={"k": "v"},
            expected_content_hash="0" * 64,
        )

    def test_output_tokens(self) -> None:
        assert wish({}, include_output_tokens=True).rows is RowsKind.PROMPT_AND_OUTPUT
        assert wish({"include_output_tokens": False}, include_output_tokens=True).rows is RowsKind.PROMPT

    def test_opting_in_and_out(self) -> None:
        assert not wish({}, capture="opt_in").capture
        assert wish({"capture": True}, capture="opt_in").capture
        assert not wish({"capture": False}).capture

    @given(st.text())
    def test_the_share_of_requests(self, request_id: str) -> None:
        assert wish({}, request_id, sample_rate=1.0).capture
        assert not wish({}, request_id, sample_rate=0.0).capture
        assert wish({"capture": True}, request_id, sample_rate=0.0).capture
        assert wish({}, request_id, sample_rate=0.5) == wish({}, request_id, sample_rate=0.5)

    def test_about_that_share(self) -> None:
        captured = sum(wish({}, f"chatcmpl-{index}", sample_rate=0.25).capture for index in range(4000))
        assert 850 < captured < 1150

    @pytest.mark.parametrize(
        ("asked", "field"),
        [
            ("yes", "hidden_states must be an object, got str"),
            (["capture"], "got list"),
            (True, "got bool"),
            ({"capture": "yes"}, "capture"),
            ({"capture": 1}, "capture"),
            ({"datset": "d"}, "has no 'datset'; did you mean 'dataset'"),
            ({"dataset": 5}, "dataset"),
            ({"dataset": "d" * 257}, "dataset has 257 bytes"),
            ({"sample_id": "ü" * 129}, "sample_id has 258 bytes"),
            ({"sample_id": "\ud800"}, "sample_id holds half a surrogate pair"),
            ({"tags": ["a"]}, "tags"),
            ({"tags": {"k": 1}}, "tags"),
            ({"tags": {"k" * 300: "v"}}, "tags key"),
            ({"tags": {"k": "v" * 300}}, "tags['k'] has 300 bytes"),
            ({"tags": {"k": "\udfff"}}, "tags['k'] holds half"),
            ({"tags": {f"k{index}": "v" * 200 for index in range(30)}}, "bytes together, at most 4096"),
            ({"include_output_tokens": "yes"}, "include_output_tokens"),
            ({"expected_content_hash": "abc"}, "expected_content_hash is 64 lower-case hex digits"),
            ({"expected_content_hash": "A" * 64}, "expected_content_hash"),
            ({"x" * 1_000_000: 1}, "has no 'xxx"),
            ({"\ud800": 1}, r"has no '\ud800'"),
            ({1: 2}, "has no '1'"),
            ({None: 2}, "has no 'None'"),
        ],
    )
    def test_a_bad_value_is_named(self, asked: Any, field: str) -> None:
        assert field in problem(asked)

    def test_a_failed_capture_keeps_its_names(self) -> None:
        """So that whoever waits for a sample learns why it will not come."""
        found = wish({"dataset": "d", "sample_id": "s", "tagz": {}})
        assert (found.dataset, found.sample_id) == ("d", "s")
        found = wish({"dataset": 5, "sample_id": "s" * 300, "tags": 1})
        assert (found.dataset, found.sample_id) == ("", "")

    @given(
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(max_size=5),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
            max_leaves=8,
        )
    )
    def test_whatever_is_asked_is_a_wish(self, asked: Any) -> None:
        assert isinstance(wish(asked), Wish)
