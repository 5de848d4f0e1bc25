#!/usr/bin/env bash
# Sets up the environment where needed, then runs every check: style, types, layers, tests.
#   bash tools/test.sh           the default suite
#   bash tools/test.sh --all     installs what else tests can compare with (torch, reasoning-gym), and compares
#   bash tools/setup_vllm.sh cpu && bash tools/test.sh -m vllm tests/real_vllm     against a real vLLM server
# Further arguments go to pytest. PYTHON, VENV: as in tools/setup.sh.
set -euo pipefail
cd "$(dirname "$0")/.."
. tools/setup.sh

if [[ ${1:-} = --all ]]; then
    shift
    "$VENV_PYTHON" -m pip install --quiet --disable-pip-version-check -r tools/requirements/optional-tests.txt
fi
bin=$(dirname "$VENV_PYTHON")
"$bin/ruff" check .
"$bin/ruff" format --check .
"$bin/mypy"
"$bin/lint-imports"
"$VENV_PYTHON" -m pytest "$@"
