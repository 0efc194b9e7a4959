#!/usr/bin/env bash
# Sets up and passes all tests: style, types, import arrows, pytest. Arguments go to pytest.
# With --fast first: in the environment that exists, all of it but the tests that start an engine or a trainer.
# With --engine VERSION first: the rig, the layout rules and extraction against that vLLM, beside the environment's own.
set -uo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/install.sh"

# Engines, sidecars and trainers share few cores: threads that wait give theirs away instead of spinning.
export OMP_WAIT_POLICY=PASSIVE KMP_BLOCKTIME=0

cd "$ROOT" || exit 1
failed=0
step() {
    say "== $*"
    "$VENV/bin/$@" || failed=1
}

if [ "${1:-}" = --engine ]; then
    version=${2:-}
    [ -n "$version" ] || fail "--engine needs a version, such as 0.33.0"
    shift 2
    [ -x "$VENV/bin/pytest" ] || fail "no tests can run in $VENV: bash deploy/test.sh makes it, HSC_VENV names another"
    install_other_engine "$version"
    PYTHONPATH=$(other_engine "$version")
    export PYTHONPATH
    step python -m pytest tests/connector/test_rig.py tests/layout tests/engine/test_extraction.py "$@"
    step python -m pytest --runner v2 tests/engine/test_extraction.py "$@"
    exit "$failed"
fi
if [ "${1:-}" = --fast ]; then
    shift
    [ -x "$VENV/bin/pytest" ] || fail "no tests can run in $VENV: bash deploy/test.sh makes it, HSC_VENV names another"
    export OMP_NUM_THREADS=1 HSC_EXAMPLES=${HSC_EXAMPLES:-0.1}
    types=$(mktemp)
    "$VENV/bin/mypy" >"$types" 2>&1 &
    mypy=$!
    tests=(-n 3 --dist worksteal --without engine,trainer,service,gpu)
else
    make_venv
    install_engine
    install_model_source
    install_project test
    install_trainer
    # Only what exports and ten steps on a CPU need of it, so what it pins is not wanted.
    installed specforge==0.2.0 || pip_install --no-deps specforge==0.2.0 || fail "pip could not install specforge==0.2.0"
    for version in 0.28.0 0.30.0; do install_other_engine "$version"; done
    tests=()
fi
step ruff check .
step ruff format --check .
[ -n "${mypy:-}" ] || step mypy
step lint-imports
step python -m pytest "${tests[@]}" "$@"
[ -n "${mypy:-}" ] || step python -m pytest --runner v2 -m both_runners "$@"
if [ -n "${mypy:-}" ]; then
    say "== mypy, meanwhile"
    wait "$mypy" || failed=1
    cat "$types" && rm "$types"
fi
exit "$failed"
