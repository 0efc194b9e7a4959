"""A version of vLLM that has no CPU build yet: its Python over the CPU kernels of the installed one.

    python deploy/overlay.py WHEEL FOLDER

FOLDER, first on PYTHONPATH, then holds `vllm` as the version of WHEEL with "+cpu". It runs as long as that version
calls the kernels as the installed one does; the tests find out.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
import zipfile
from pathlib import Path

__all__ = ["lay_over"]


def lay_over(wheel: Path, kernels: Path, folder: Path) -> str:
    """Fills `folder` from a wheel of vLLM and the `vllm` folder of a CPU build; the version it then says it is."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if _is_wanted(name)]
        archive.extractall(folder, names)
    for kernel in kernels.glob("*.so"):
        shutil.copy2(kernel, folder / "vllm" / kernel.name)
    (metadata,) = folder.glob("vllm-*.dist-info/METADATA")
    lines = metadata.read_text().split("\n")
    at = next(index for index, line in enumerate(lines) if line.startswith("Version: "))
    lines[at] += "+cpu"
    metadata.write_text("\n".join(lines))
    return lines[at].removeprefix("Version: ")


def _is_wanted(name: str) -> bool:
    """Python and its data, not the kernels for other devices nor what they are compiled from."""
    return not name.endswith((".so", ".h", ".hpp", ".cuh", ".inl", ".cu", ".cpp"))


def _installed() -> Path:
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        sys.exit("no vLLM is installed, whose CPU kernels could be taken")
    return Path(found.origin).parent


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    print(lay_over(Path(sys.argv[1]), _installed(), Path(sys.argv[2])))
