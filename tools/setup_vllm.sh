#!/usr/bin/env bash
# Makes the environment of the vLLM servers (rollouts.engine=vllm), apart from this project's own, once.
#   bash tools/setup_vllm.sh cpu|cuda12
#   VLLM_PYTHON=python3.11   which interpreter (vLLM for CPUs wants 3.11)     VLLM_VENV=.venv-vllm   where it goes
set -euo pipefail
cd "$(dirname "$0")/.."

PLATFORM=${1:-}
PYTHON=${VLLM_PYTHON:-python3.11}
VENV=${VLLM_VENV:-.venv-vllm}
REQUIREMENTS=tools/requirements/vllm-$PLATFORM.txt

[[ -f $REQUIREMENTS ]] || { echo "setup_vllm: which platform? bash tools/setup_vllm.sh cpu|cuda12" >&2; exit 2; }
"$PYTHON" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null || {
    echo "setup_vllm: $PYTHON is missing or not Python 3.11; name one: VLLM_PYTHON=/path/to/python3.11" >&2; exit 2; }

# The stamp holds what was installed: the environment is made anew only when that changes.
STAMP=$VENV/.installed
WANTED=$("$PYTHON" -V; cat "$REQUIREMENTS")
if [[ ! -f $STAMP ]] || [[ $(<"$STAMP") != "$WANTED" ]]; then
    echo "setup_vllm: making $VENV for $PLATFORM (2 GB on cpu, about 3 minutes)" >&2
    "$PYTHON" -m venv --clear "$VENV"
    # The files are complete: pip must not add what they leave out.
    "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps -r "$REQUIREMENTS"
    printf '%s\n' "$WANTED" > "$STAMP"
fi
