"""What the documents tell people to run is run, on captures in bfloat16, which numpy cannot hold (safetensors#598).

Their tables are compared with the code, and what they point to is there.
"""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import httpx
import msgspec
import pytest
import torch
import yaml
from fastapi.routing import APIRoute

from hsconnector.capture.layers import choose_layers
from hsconnector.capture.protocol import FailReason
from hsconnector.capture.record import FindingKind
from hsconnector.capture.shard import open_shard
from hsconnector.cli.command_line import extraction_options
from hsconnector.connector.settings import ConnectorSettings, RequestSettings
from server.metrics import Metrics
from server.routes import ROUTERS
from tests.feeding import Feeder
from tests.needs import NEEDS
from tests.sidecar import SidecarThread, start_sidecar

ROOT = Path(__file__).parents[1]
DOCUMENTS = [
    path for path in (ROOT / "README.md", *sorted(ROOT.glob("*/README.md"))) if not path.parent.name.startswith(".")
]
TEXT = {str(path.relative_to(ROOT)): path.read_text() for path in DOCUMENTS}
LAYERS = (2, 18, 33, 36)
TOKENS = [5, 6, 7]


def blocks(document: str, language: str, word: str) -> Iterator[str]:
    """The fenced blocks of a language that hold a word."""
    for block in re.findall(rf"^```{language}\n(.*?)^```", TEXT[document], re.MULTILINE | re.DOTALL):
        if word in block:
            yield block


def table(document: str, heading: str) -> list[list[str]]:
    """The cells of the first table below a heading, without its first two lines."""
    section = re.split(r"^#+ ", TEXT[document].partition(f"# {heading}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    assert lines, f"{document} has no table below {heading!r}"
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def names(document: str, heading: str) -> list[str]:
    """What stands in backquotes in the first column of a table."""
    return [name for row in table(document, heading) for name in re.findall(r"`([^`]+)`", row[0])]


def run(block: str, words: Mapping[str, str], given: dict[str, Any]) -> dict[str, Any]:
    """Executes a block after replacing `words`, each of which it must hold."""
    for word, put in words.items():
        assert word in block, word
        block = block.replace(word, put)
    exec(compile(block, "README.md", "exec"), given)
    return given


def feed(url: str, **more: Any) -> str:
    states = torch.randn(len(TOKENS), len(LAYERS), 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    with Feeder(url, layer_ids=LAYERS, hidden_size=16, dtype=torch.bfloat16, **more) as feeder:
        return feeder.capture(states, TOKENS, dataset="mine", sample_id="17")


@pytest.fixture
def capture_id(sidecar: SidecarThread) -> str:
    return feed(sidecar.url)


def test_reading_captures(sidecar: SidecarThread, capture_id: str, capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = blocks("README.md", "python", "hsconnector.client")
    handle = f"{sidecar.url}/v1/captures/{capture_id}"
    found = run(block, {"http://127.0.0.1:8190": sidecar.url}, {"handle": handle})
    assert found["capture"].hidden_states.dtype is torch.bfloat16
    assert found["capture"].layer_ids == LAYERS
    assert capsys.readouterr().out == f"{capture_id} ready 3\n"


def test_a_key_in_the_client(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = blocks("deploy/README.md", "python", "hsconnector.client")
    sidecar = start_sidecar(tmp_path / "store", api_key="secret")
    try:
        run(block, {"http://127.0.0.1:8190": sidecar.url, 'api_key="…"': 'api_key="secret"'}, {})
    finally:
        sidecar.stop()
    assert capsys.readouterr().out == "0 captures are ready\n"


def test_a_loop_of_ones_own(sidecar: SidecarThread, capture_id: str, tmp_path: Path) -> None:
    (block,) = blocks("hsconnector/README.md", "python", "hsconnector.dataset")
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"input_ids": TOKENS, "loss_mask": [0, 1, 1]}))
    trained: list[dict[str, Any]] = []
    words = {
        "/data/captures": str(sidecar.store),
        "rows.jsonl": str(rows),
        "http://127.0.0.1:8190": sidecar.url,
        'queue="epoch-1"': 'queue="epoch-1", idle_s=0.2',
        "num_workers=2": "num_workers=0",
    }
    found = run(block, words, {"train": trained.append})
    assert found["offline"][0]["loss_mask"].tolist() == [0, 1, 1]
    assert [batch["capture_id"] for batch in trained] == [capture_id]
    assert list(trained[0]) and set(trained[0]) == set(names("hsconnector/README.md", "Your own PyTorch loop"))


def test_the_serve_line_is_what_launch_runs() -> None:
    (block,) = blocks("README.md", "sh", "vllm serve Qwen")
    words = shlex.split(block.replace("\\\n", " "))
    expected = extraction_options(choose_layers("auto", 36).layer_ids)
    assert words[:3] == ["vllm", "serve", "Qwen/Qwen3-8B"]
    assert words[3::2] == expected[::2]
    assert [json.loads(word) for word in words[4::2]] == [json.loads(word) for word in expected[1::2]]


def test_the_lines_for_the_shell_are_answered(sidecar: SidecarThread, capture_id: str) -> None:
    (block,) = blocks("server/README.md", "sh", "curl")
    with httpx.Client(base_url=sidecar.url) as http:
        request_id = http.get(f"/v1/captures/{capture_id}").json()["request_id"]
        words = {"01a2…": capture_id, "my-request-id": request_id, "rows=0:128": f"rows=0:{len(TOKENS)}"}
        for line in block.splitlines():
            (path,) = re.findall(r"'localhost:8190(/[^']+)'", line)
            for word, put in words.items():
                path = path.replace(word, put)
            assert http.get(path).status_code == 200, line


def test_the_scrape_configuration_is_yaml() -> None:
    (block,) = blocks("deploy/README.md", "yaml", "scrape_configs")
    assert yaml.safe_load(block)["scrape_configs"][0]["job_name"] == "hsconnector"


def fields(kind: type[msgspec.Struct]) -> list[str]:
    return [field.name for field in msgspec.structs.fields(kind)]


def routes() -> list[str]:
    return [
        f"{method} {route.path.replace(':path', '')}"
        for router in ROUTERS
        for route in router.routes
        if isinstance(route, APIRoute) and route.include_in_schema
        for method in sorted(route.methods)
    ]


def metrics() -> list[str]:
    """Every name that `/metrics` gives, histograms by what they are called themselves."""
    samples = {"counter": "_total"}
    return [f"{family.name}{samples.get(family.type, '')}" for family in Metrics().registry.collect()]


@pytest.mark.parametrize(
    ("document", "heading", "listed"),
    [
        ("hsconnector/README.md", "Settings of the connector", lambda: fields(ConnectorSettings)),
        ("hsconnector/README.md", "Settings of a request", lambda: fields(RequestSettings)),
        ("server/README.md", "Routes", routes),
        ("deploy/README.md", "Monitoring", metrics),
        ("tests/README.md", "What needs what", lambda: list(NEEDS)),
    ],
)
def test_tables_are_complete(document: str, heading: str, listed: Callable[[], list[str]]) -> None:
    assert sorted(names(document, heading)) == sorted(listed())


def test_every_reason_and_finding_is_explained() -> None:
    text = TEXT["server/README.md"].partition("## States and reasons\n")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE) == [*FindingKind, *FailReason]


def test_the_metadata_of_a_shard_are_explained(sidecar: SidecarThread, capture_id: str) -> None:
    known = {"weights_id", "lora_weights_id", "kv_cache_dtype"}
    (path,) = sidecar.store.rglob("*.safetensors")
    section = TEXT["server/README.md"].partition("Its metadata are strings:")[2].partition("\n## ")[0]
    keys = [key for line in re.findall(r"^\| (`.*?) \|", section, re.MULTILINE) for key in re.findall(r"`(\w+)`", line)]
    assert sorted(keys) == sorted(known | open_shard(path).metadata.keys())


# ---- what is pointed to


@pytest.mark.parametrize("document", TEXT)
def test_links_lead_somewhere(document: str) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", TEXT[document]) + re.findall(r'(?:src|srcset)="([^"]+)"', TEXT[document])
    for link in links:
        path, _, anchor = link.partition("#")
        target = (ROOT / document).parent / path if path else ROOT / document
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target.read_text()), link


def anchors(text: str) -> set[str]:
    """The anchors that GitHub gives to the headings of a document."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("heading", ["Which test proves what", "Where things lie"])
def test_files_that_are_named_are_there(heading: str) -> None:
    for row in table("tests/README.md", heading):
        paths = re.findall(r"`([^`]+/[^`]+)`", row[1])
        assert 1 <= len(paths) <= 3, row
        assert [path for path in paths if not (ROOT / path).is_file()] == []


def test_the_front_page_is_one_page_and_leads_to_all_others() -> None:
    front = TEXT["README.md"]
    assert len(front.split()) <= 1000
    assert [name for name in TEXT if name != "README.md" and f"({name})" not in front] == []


def test_the_picture_is_the_same_by_day_and_by_night() -> None:
    light, dark = (ElementTree.parse(ROOT / "deploy" / f"path-{name}.svg") for name in ("light", "dark"))
    assert [element.text for element in light.iter()] == [element.text for element in dark.iter()]
    assert drawn(light) == drawn(dark)


def drawn(picture: ElementTree.ElementTree[ElementTree.Element]) -> list[dict[str, str]]:
    """Every element without its colours."""
    return [
        {name: value for name, value in element.attrib.items() if name not in ("fill", "stroke")}
        for element in picture.iter()
    ]


def test_the_licence_lies_where_the_project_names_it() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["license"] == "Apache-2.0"
    for name in project["license-files"]:
        assert "Apache License" in (ROOT / name).read_text()
        assert f"COPY {name} {name}" in (ROOT / "deploy/Dockerfile").read_text()
        assert f"COPY --from=project {name} /src/{name}" in (ROOT / "deploy/compose.yaml").read_text()
