#!/usr/bin/env bash
# From prompts to a trained EAGLE-3 drafter on this machine, from nothing but Python 3.11; under half an hour.
set -uo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/install.sh"

export HSC_CPU=1
make_venv
install_engine
install_project serve,verify
install_model_source
install_trainer
exec "$VENV/bin/python" "$ROOT/deploy/train_demo.py" "$@"
