#!/usr/bin/env bash
# Hidden states of a real model on this machine, from nothing but Python 3.11: installs, serves, asks, verifies.
set -uo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/install.sh"

make_venv
install_engine
install_project serve,verify
install_model_source
exec "$VENV/bin/python" "$ROOT/deploy/demo.py" "$@"
