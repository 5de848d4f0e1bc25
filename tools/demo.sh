#!/usr/bin/env bash
# Sets up the environment where needed, then runs sGPO end to end on a tiny model: about 5 minutes on two CPU cores.
# Arguments are overrides of configs/demo.yaml: bash tools/demo.sh run_dir=runs/mine train.epochs=1
set -euo pipefail
cd "$(dirname "$0")/.."
. tools/setup.sh

exec "$VENV_PYTHON" -m sgpo_jax.launch run configs/demo.yaml "$@"
