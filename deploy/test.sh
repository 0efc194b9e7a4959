#!/usr/bin/env bash
# Sets up and passes all tests: style, types, import arrows, pytest. Arguments go to pytest.
# With --fast first: in the environment that exists, all of it but the tests that start an engine or a trainer.
# With --engine VERSION first: what depends on vLLM, against that version, which it installs beside the environment's own.
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

if [ "${1:-}" = --fast ]; then
    shift
    [ -x "$VENV/bin/pytest" ] || fail "no tests can run in $VENV: bash deploy/test.sh makes it, HSC_VENV names another"
    export OMP_NUM_THREADS=1 HSC_EXAMPLES=${HSC_EXAMPLES:-0.25}
    types=$(mktemp)
    "$VENV/bin/mypy" >"$types" 2>&1 &
    mypy=$!
    tests=(-n 2 --dist worksteal --without engine,trainer,service,gpu)
else
    make_venv
    install_engine
    install_model_source
    install_project test
    install_trainer
    # Its own reader, normaliser and collator take the exports; it is not run, so what it pins is not wanted.
    installed specforge==0.2.0 || pip_install --no-deps specforge==0.2.0 || fail "pip could not install specforge==0.2.0"
    for version in 0.28.0 0.30.0 "$NEWEST_ENGINE"; do install_other_engine "$version"; done
    tests=()
fi
step ruff check .
step ruff format --check .
[ -n "${mypy:-}" ] || step mypy
step lint-imports
step python -m pytest "${tests[@]}" "$@"
if [ -z "${mypy:-}" ]; then
    step python -m pytest --runner v2 -m both_runners "$@"
    against "$NEWEST_ENGINE" --runner v2 tests/connector/test_rig.py tests/layout tests/engine/test_extraction.py
fi
if [ -n "${mypy:-}" ]; then
    say "== mypy, meanwhile"
    wait "$mypy" || failed=1
    cat "$types" && rm "$types"
fi
exit "$failed"
