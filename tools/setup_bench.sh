#!/usr/bin/env bash
# Makes the environment that benchmarks compare with: PyTorch and transformers, which the product does not need.
#   PYTHON=python3.12   which interpreter       BENCH_VENV=.venv-bench   where it goes
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
BENCH_VENV=${BENCH_VENV:-.venv-bench}
"$PYTHON" -m venv --clear "$BENCH_VENV"
"$BENCH_VENV/bin/python" -m pip install --quiet --disable-pip-version-check -r tools/requirements/bench.txt
