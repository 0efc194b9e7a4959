"""Nobody can run containers in these tests; what can be checked is that the files say what they must."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"


def compose() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    return found


def test_both_services_share_memory_and_store() -> None:
    services = compose()["services"]
    for service in services.values():
        mounts = [mount.split(":")[:2] for mount in service["volumes"]]
        assert ["shm", "/dev/shm"] in mounts
        assert ["store", "/store"] in mounts
    assert set(compose()["volumes"]) >= {"shm", "store"}


def test_the_memory_belongs_to_the_sidecars_group() -> None:
    group = re.search(r"ARG GID=(\d+)", (DEPLOY / "Dockerfile").read_text())
    assert group is not None
    assert f"gid={group[1]}" in compose()["volumes"]["shm"]["driver_opts"]["o"]
    assert compose()["services"]["vllm"]["group_add"] == [group[1]]


def test_the_engine_is_told_valid_json() -> None:
    command = compose()["services"]["vllm"]["command"]
    plain = [re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", str(part)) for part in command]
    options = dict(zip(plain[1::2], plain[2::2], strict=True))
    assert json.loads(options["--speculative-config"])["method"] == "extract_hidden_states"
    transfer = json.loads(options["--kv-transfer-config"])
    assert transfer["kv_connector_module_path"] == "hsconnector.connector"
    assert transfer["kv_connector_extra_config"]["sidecar"] == "http://sidecar:8190"


def test_the_image_has_no_torch_and_no_root() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    assert '".[serve]"' in text
    assert "USER hsconnector" in text
    assert not re.search(r"(?i)install.*(torch|vllm)", text)
    for folder in re.findall(r"^COPY (\w+) ", text, re.MULTILINE):
        assert folder == "pyproject.toml" or (DEPLOY.parent / folder).exists()
