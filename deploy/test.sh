#!/usr/bin/env bash
# Sets up and passes all tests: style, types, import arrows, pytest. Arguments go to pytest.
set -uo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/install.sh"

make_venv
install_engine
install_model_source
install_project test
install_trainer
# Its own reader, normaliser and collator take the exports; it is not run, so what it pins is not wanted.
installed specforge==0.2.0 || pip_install --no-deps specforge==0.2.0 || fail "pip could not install specforge==0.2.0"
for version in 0.28.0 0.30.0; do install_other_engine "$version"; done

# Engines, sidecars and trainers share few cores: threads that wait give theirs away instead of spinning.
export OMP_WAIT_POLICY=PASSIVE KMP_BLOCKTIME=0

cd "$ROOT" || exit 1
failed=0
step() {
    say "== $*"
    "$VENV/bin/$@" || failed=1
}
step ruff check .
step mypy
step lint-imports
step python -m pytest "$@"
exit "$failed"
