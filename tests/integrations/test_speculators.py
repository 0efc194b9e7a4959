"""The speculators backend: what it finds, what it refuses, and real training runs that cannot tell it from files."""

from __future__ import annotations

import argparse
import contextlib
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hs_connectors import HiddenStatesBackend

from hsconnector.capture.protocol import Commit, FailReason, Rows, Span, pack_token_ids
from hsconnector.client import Client
from hsconnector.errors import CaptureError, CaptureFailed, CapturePending, SettingsError, SidecarUnreachable
from hsconnector.integrations.speculators import (
    NAME,
    RunSettings,
    SidecarBackend,
    SidecarTransfer,
    register,
)
from hsconnector.integrations.target_layers import TargetLayers, target_layers_of
from tests.feeding import Feeder
from tests.models import LAYER_IDS, NUM_LAYERS, tiny_qwen3
from tests.shards import overwrite
from tests.sidecar import SidecarThread
from tests.training import NOBODY, STEPS, TARGETS, make_rows, train, write_dataset, write_plain_files

pytestmark = pytest.mark.trainer

HIDDEN = 256
LAYERS = TargetLayers(TARGETS, NUM_LAYERS)
ROWS = make_rows(seed=1)
generator = torch.Generator().manual_seed(0)


def states_of(row: list[int], slots: int = len(LAYER_IDS)) -> torch.Tensor:
    return torch.randn(len(row), slots, HIDDEN, generator=generator)


@pytest.fixture
def feeder(sidecar: SidecarThread) -> Iterator[Feeder]:
    with Feeder(sidecar.url, layer_ids=LAYER_IDS, hidden_size=HIDDEN, num_layers=NUM_LAYERS) as feeding:
        yield feeding


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("data") / "rows", ROWS)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen3(tmp_path_factory.mktemp("model"))


@pytest.fixture
def settings(sidecar: SidecarThread, data: Path) -> RunSettings:
    return RunSettings(str(data), "tiny", LAYERS, LAYERS.captured, sidecar.url, wait_s=5)


Connect = Callable[[RunSettings], SidecarTransfer]


@pytest.fixture
def connect() -> Iterator[Connect]:
    with contextlib.ExitStack() as stack:

        def connecting(settings: RunSettings) -> SidecarTransfer:
            return stack.enter_context(contextlib.closing(SidecarTransfer(settings)))

        yield connecting


class TestCached:
    def test_rows_are_found_by_their_tokens_in_whatever_order_they_were_captured(
        self, connect: Connect, settings: RunSettings, feeder: Feeder
    ) -> None:
        states = {index: states_of(ROWS[index]) for index in (5, 0, 3)}
        for index, rows in states.items():
            feeder.capture(rows, ROWS[index], sample_id="hs_99")
        transfer = connect(settings)
        for index, rows in states.items():
            sample = transfer.get_cached(index)
            assert sample is not None
            assert torch.equal(sample["hidden_states"], rows) and sample["token_ids"].tolist() == ROWS[index]
        assert transfer.get_cached(1) is None

    def test_the_same_tokens_of_another_model_or_adapter_are_not_found(
        self,
        connect: Connect,
        settings: RunSettings,
        sidecar: SidecarThread,
        feeder: Feeder,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        feeder.capture(states_of(ROWS[0]), ROWS[0])
        other = connect(replace(settings, model="other"))
        assert other.get_cached(0) is None and other.get_cached(0) is None
        assert connect(replace(settings, lora="adapter")).get_cached(0) is None
        assert connect(replace(settings, captured=(0, 1, 2, 3, 6))).get_cached(0) is None
        warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert len(warnings) == 3 and "'tiny'" in warnings[0] and "--hsc-model" in warnings[0]

    def test_captures_of_other_weights_than_the_engines_are_not_found(
        self, connect: Connect, settings: RunSettings, sidecar: SidecarThread, caplog: pytest.LogCaptureFixture
    ) -> None:
        """vllm#57810: the model's name is the same; the engine that sends now decides, or what is said."""
        about = {"layer_ids": LAYER_IDS, "hidden_size": HIDDEN, "num_layers": NUM_LAYERS}
        old, new = states_of(ROWS[0]), states_of(ROWS[1])
        with Feeder(sidecar.url, weights_id="a" * 64, **about) as feeding:  # type: ignore[arg-type]
            feeding.capture(old, ROWS[0])
            feeding.close_stream()
        sample = connect(settings).get_cached(0)
        assert sample is not None and torch.equal(sample["hidden_states"], old)
        with Feeder(sidecar.url, weights_id="b" * 64, **about) as feeding:  # type: ignore[arg-type]
            name = feeding.capture(new, ROWS[1])
            transfer = connect(settings)
            assert transfer.get_cached(0) is None and transfer.get_cached(1) is not None
            assert "captures of other weights than bbbbbbbbbbbb are not taken: 1 of weights aaaaaaaaaaaa" in caplog.text
            feeding.close_stream()
        with pytest.raises(SettingsError, match="--hsc-weights-id"):
            connect(settings).get_cached(0)
        chosen = connect(replace(settings, weights_id="a"))
        sample = chosen.get_cached(0)
        assert sample is not None and torch.equal(sample["hidden_states"], old)
        with pytest.raises(SettingsError, match=r"of weights b{12}, this run trains on a{12}"):
            chosen.get_generated({"capture_id": name, "handle": f"{sidecar.url}/v1/captures/{name}"})

    def test_an_engine_that_captures_more_layers_gives_those_that_are_trained_on(
        self, connect: Connect, settings: RunSettings, sidecar: SidecarThread
    ) -> None:
        captured = (0, 1, 2, 3, 5, 6)
        with Feeder(sidecar.url, layer_ids=captured, hidden_size=HIDDEN, num_layers=NUM_LAYERS) as feeding:
            states = states_of(ROWS[0], len(captured))
            feeding.capture(states, ROWS[0])
        sample = connect(replace(settings, captured=captured)).get_cached(0)
        assert sample is not None and torch.equal(sample["hidden_states"], states[:, [0, 1, 3, 5]])

    def test_a_target_that_is_the_last_layer_fills_two_slots(
        self, connect: Connect, settings: RunSettings, sidecar: SidecarThread
    ) -> None:
        layers = TargetLayers((3, 6), NUM_LAYERS)
        with Feeder(sidecar.url, layer_ids=(3, 6), hidden_size=HIDDEN, num_layers=NUM_LAYERS) as feeding:
            states = states_of(ROWS[0], 2)
            feeding.capture(states, ROWS[0])
        sample = connect(replace(settings, layers=layers, captured=layers.captured)).get_cached(0)
        assert sample is not None and torch.equal(sample["hidden_states"], states[:, [0, 1, 1]])

    def test_unsound_captures_are_not_found(self, connect: Connect, settings: RunSettings, feeder: Feeder) -> None:
        states = states_of(ROWS[0])
        states[3] = 0
        feeder.capture(states, ROWS[0])
        assert connect(settings).get_cached(0) is None

    def test_a_file_that_was_taken_away_leaves_the_capture_before_it(
        self, connect: Connect, settings: RunSettings, sidecar: SidecarThread, feeder: Feeder
    ) -> None:
        states = states_of(ROWS[0])
        feeder.capture(states, ROWS[0])
        time.sleep(0.002)  # ids of one millisecond are in no order
        newest = feeder.capture(states_of(ROWS[0]), ROWS[0])
        (sidecar.store / "captures" / newest[-2:] / f"{newest}.safetensors").unlink()
        transfer = connect(settings)
        sample = transfer.get_cached(0)
        assert sample is not None and torch.equal(sample["hidden_states"], states)
        with Client(sidecar.url) as client:
            client.delete(client.find(state="ready")[0])
        assert transfer.get_cached(0) is None

    def test_a_damaged_shard_leaves_an_older_one_or_is_passed_over(
        self, connect: Connect, settings: RunSettings, sidecar: SidecarThread, feeder: Feeder
    ) -> None:
        states = states_of(ROWS[0])
        feeder.capture(states, ROWS[0])
        time.sleep(0.002)  # ids of one millisecond are in no order
        names = [feeder.capture(states_of(row), row) for row in ROWS[:3]]
        for name in names:
            path = sidecar.store / "captures" / name[-2:] / f"{name}.safetensors"
            data = bytearray(path.read_bytes())
            data[-10] ^= 1
            overwrite(path, data)
        transfer = connect(replace(settings, max_bad=1 / len(ROWS)))
        sample = transfer.get_cached(0)
        assert sample is not None and torch.equal(sample["hidden_states"], states)
        assert transfer.get_cached(1) is None and transfer.get_cached(1) is None, "as if it were not stored"
        with pytest.raises(CaptureError, match=r"2 of \d+ samples cannot be had.*'row 1'.*is damaged.*'row 2'"):
            transfer.get_cached(2)

    def test_a_sidecar_that_is_down_is_waited_for_and_then_named(self, connect: Connect, settings: RunSettings) -> None:
        transfer = connect(replace(settings, url="http://127.0.0.1:9", wait_s=0.1))
        with pytest.raises(SidecarUnreachable, match=r"127\.0\.0\.1:9"):
            transfer.get_cached(0)

    def test_it_is_pickled_without_its_connection(
        self, connect: Connect, settings: RunSettings, feeder: Feeder
    ) -> None:
        feeder.capture(states_of(ROWS[0]), ROWS[0])
        transfer = connect(settings)
        assert transfer.get_cached(0) is not None
        copy: SidecarTransfer = pickle.loads(pickle.dumps(transfer))
        with contextlib.closing(copy):
            assert copy.settings == settings and copy.get_cached(0) is not None


class TestGenerated:
    def answer(self, sidecar: SidecarThread, capture_id: str) -> dict[str, Any]:
        return {"handle": f"{sidecar.url}/v1/captures/{capture_id}", "capture_id": capture_id}

    def test_it_blocks_until_the_capture_is_whole(
        self, connect: Connect, settings: RunSettings, sidecar: SidecarThread, feeder: Feeder
    ) -> None:
        row, states = ROWS[0], states_of(ROWS[0])
        capture_id = feeder.open(len(row))
        found: list[dict[str, torch.Tensor]] = []
        transfer, answer = connect(settings), self.answer(sidecar, capture_id)
        thread = threading.Thread(target=lambda: found.append(transfer.get_generated(answer)))
        thread.start()
        thread.join(0.3)
        assert thread.is_alive() and not found
        payload = bytes(states.view(torch.uint8).numpy().data)
        rows = Rows(capture_id, 0, len(row), Span(0, len(payload)))
        feeder.send(rows, Commit(capture_id, len(row), pack_token_ids(row), "length"), payload=payload)
        thread.join()
        assert torch.equal(found[0]["hidden_states"], states)

    def test_a_failed_capture_says_why(
        self, connect: Connect, settings: RunSettings, sidecar: SidecarThread, feeder: Feeder
    ) -> None:
        capture_id = feeder.open(4)
        feeder.fail(capture_id, FailReason.STALLED, "no rows")
        with pytest.raises(CaptureFailed, match=r"stalled \(no rows\)"):
            connect(settings).get_generated(self.answer(sidecar, capture_id))

    def test_a_capture_that_never_ends_is_given_up(
        self, connect: Connect, settings: RunSettings, sidecar: SidecarThread, feeder: Feeder
    ) -> None:
        answer = self.answer(sidecar, feeder.open(4))
        with pytest.raises(CapturePending):
            connect(replace(settings, wait_s=0.2)).get_generated(answer)

    @pytest.mark.parametrize(
        ("change", "says"),
        [
            ({"model": "other"}, "of model 'other', this run is for 'tiny'.*--hsc-model other"),
            ({"num_layers": 8}, "8 decoder layers, the verifier has 6"),
            ({"layer_ids": (1, 2, 3, 6)}, r"holds layers \[1, 2, 3, 6\].*\[0\] are missing.*--layers 0,1,3,6"),
            ({"layer_ids": (0, 1, 3, 5)}, r"\[6\] are missing"),
        ],
    )
    def test_what_the_trainer_would_not_notice_is_refused(
        self, connect: Connect, settings: RunSettings, sidecar: SidecarThread, change: dict[str, Any], says: str
    ) -> None:
        about: dict[str, Any] = {"layer_ids": LAYER_IDS, "hidden_size": HIDDEN, "num_layers": NUM_LAYERS, **change}
        with Feeder(sidecar.url, **about) as feeding:
            capture_id = feeding.capture(states_of(ROWS[0]), ROWS[0])
        with pytest.raises(SettingsError, match=says):
            connect(settings).get_generated(self.answer(sidecar, capture_id))

    def test_another_sidecars_handle_is_named(self, connect: Connect, settings: RunSettings) -> None:
        answer = {"handle": f"http://elsewhere:8190/v1/captures/{'0' * 32}"}
        with pytest.raises(SettingsError, match=r"elsewhere:8190.*--sidecar"):
            connect(replace(settings, wait_s=0.2)).get_generated(answer)

    def test_another_connectors_answer_is_named(self, connect: Connect, settings: RunSettings) -> None:
        with pytest.raises(SettingsError, match="does the engine use its connector"):
            connect(settings).get_generated({"hidden_states_path": "/tmp/cmpl-7.safetensors"})

    @pytest.mark.parametrize("keep", [False, True])
    def test_delete_releases_a_capture_by_handle_or_by_path(
        self, connect: Connect, settings: RunSettings, sidecar: SidecarThread, feeder: Feeder, keep: bool
    ) -> None:
        ids = [feeder.capture(states_of(ROWS[index]), ROWS[index]) for index in range(2)]
        transfer = connect(replace(settings, keep=keep))
        transfer.delete(f"{sidecar.url}/v1/captures/{ids[0]}")
        transfer.delete(f"/store/captures/{ids[1][-2:]}/{ids[1]}.safetensors")
        transfer.delete(ids[1])
        with Client(sidecar.url) as client:
            assert {client.record(capture_id).state for capture_id in ids} == {"ready" if keep else "expired"}


class TestSettings:
    def arguments(self, model: Path, **changed: Any) -> argparse.Namespace:
        parser = argparse.ArgumentParser()
        SidecarBackend.add_train_args(parser)
        given = {"verifier_name_or_path": str(model), "speculator_type": "eagle3", "from_pretrained": ""}
        return argparse.Namespace(**{**vars(parser.parse_args([])), **given, "target_layer_ids": None, **changed})

    def test_every_option_is_one_their_parser_keeps(self) -> None:
        parser = argparse.ArgumentParser(add_help=False)
        SidecarBackend.add_train_args(parser)
        for action in parser._actions:
            assert action.option_strings[0].startswith(("--hsc-", "--sidecar"))
            assert action.type in (str, float) and action.nargs is None and isinstance(action.default, action.type)

    def test_layers_default_to_the_trainers_own(self, model: Path) -> None:
        assert target_layers_of(self.arguments(model, target_layer_ids=[3, 0, 1])) == LAYERS
        assert target_layers_of(self.arguments(model, speculator_type="mtp")).slots == (NUM_LAYERS,)
        deep = tiny_qwen3(model / "deep", num_hidden_layers=12)
        assert target_layers_of(self.arguments(deep)).slots == (2, 6, 9, 12)

    def test_a_checkpoint_to_go_on_from_brings_its_layers(self, model: Path, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text('{"eagle_aux_hidden_state_layer_ids": [1, 2, 5]}')
        given = self.arguments(model, from_pretrained=str(tmp_path), target_layer_ids=[0, 1, 3])
        assert target_layers_of(given).slots == (1, 2, 5, 6)

    def test_an_engine_without_the_layers_is_refused_before_training(self, model: Path) -> None:
        given = self.arguments(model, target_layer_ids=[0, 1, 3], hsc_layers="0,1,2,6")
        with pytest.raises(SettingsError, match=r"\[3\] are missing"):
            SidecarBackend.from_train_args(given, "data")
        with pytest.raises(SettingsError, match=r"2,18,33,36, not '1;2'"):
            SidecarBackend.from_train_args(self.arguments(model, hsc_layers="1;2", target_layer_ids=[1]), "data")

    def test_registering_twice_is_harmless(self) -> None:
        register()
        register()
        assert HiddenStatesBackend.registry[NAME] is SidecarBackend

    @pytest.mark.parametrize(
        ("words", "variables", "sidecar"),
        [
            (["--sidecar", "http://h:1"], {"HSC_SIDECAR": "http://other:1"}, "http://h:1"),
            (["--hsc-url", "http://h:1"], {"HSC_SIDECAR": "http://other:1"}, "http://h:1"),
            ([], {"HSC_SIDECAR": "http://h:1", "HSC_URL": "http://other:1"}, "http://h:1"),
            ([], {"HSC_URL": "http://h:1"}, "http://h:1"),
            ([], {}, "http://127.0.0.1:8190"),
        ],
    )
    def test_their_launcher_gets_our_connector(
        self, words: list[str], variables: dict[str, str], sidecar: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("HSC_SIDECAR", "HSC_URL"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        parser = argparse.ArgumentParser()
        SidecarBackend.add_launch_args(parser)
        config = SidecarBackend.build_kv_transfer_config(parser.parse_args(words))
        assert config["kv_connector"] == "HiddenStatesConnector"
        assert config["kv_connector_extra_config"] == {"sidecar": sidecar}

    def test_the_older_name_of_the_sidecar_still_works(self, model: Path) -> None:
        given = self.arguments(model, target_layer_ids=[0, 1, 3], hsc_url="http://h:1")
        assert SidecarBackend.from_train_args(given, "data").settings.url == "http://h:1"


def hsconnector(*arguments: str, before: str = "") -> subprocess.CompletedProcess[str]:
    code = f"import sys; {before}\nfrom hsconnector.cli import main; main({list(arguments)!r})"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


class TestCommand:
    def test_without_speculators_it_says_what_to_install(self) -> None:
        done = hsconnector("train", "--data-path", "x", before="sys.modules['hs_connectors'] = None")
        assert done.returncode == 3
        assert "training needs hs_connectors: pip install 'hsconnector[train]'" in done.stderr

    def test_help_and_usage_are_theirs_with_our_options(self) -> None:
        done = hsconnector("train", "--help")
        assert done.returncode == 0
        assert "--sidecar" in done.stdout and "--ttt-steps" in done.stdout
        assert "--hsc-url" not in done.stdout.partition("hidden-states backends")[2]
        assert hsconnector("train", "--no-such-option").returncode == 2


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
def test_training_cannot_tell_stored_captures_from_plain_files(
    kind: str, model: Path, sidecar: SidecarThread, tmp_path: Path
) -> None:
    """All in spawned workers, since their number moves DFlash's random anchors.

    That losses can differ at all is shown last: one capture, rolled by a row.
    """
    data = write_dataset(tmp_path / "data", ROWS)
    states = [states_of(row) for row in ROWS]
    about: dict[str, Any] = {
        "layer_ids": LAYER_IDS,
        "hidden_size": HIDDEN,
        "num_layers": NUM_LAYERS,
        "model": str(model),
    }
    with Feeder(sidecar.url, **about) as feeding:
        ids = [feeding.capture(rows, tokens) for rows, tokens in zip(reversed(states), reversed(ROWS), strict=True)]
    files = write_plain_files(tmp_path / "files", sidecar.url, ROWS)
    offline = ("--vllm-endpoint", NOBODY, "--on-missing", "raise", "--num-workers", "2")
    ours = (*offline, "--sidecar", sidecar.url)

    plain = train(tmp_path, "plain", "speculators", kind, model, data, *offline, "--hidden-states-path", str(files))
    assert len(plain.steps) in STEPS and plain.error_records == 0
    stored = train(tmp_path, "stored", "hsconnector", kind, model, data, *ours)
    assert stored.steps == plain.steps

    with Client(sidecar.url) as client, Feeder(sidecar.url, **about) as feeding:
        client.delete(ids[-1])
        feeding.capture(states[0].roll(1, 0), ROWS[0])
    rolled = train(tmp_path, "rolled", "hsconnector", kind, model, data, *ours)
    assert rolled.losses != plain.losses and rolled.error_records == 0
