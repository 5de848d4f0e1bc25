#!/usr/bin/env bash
# Makes the environment of the vLLM servers (rollouts.engine=vllm), apart from this project's own, once.
#   bash tools/setup_vllm.sh cpu|cuda12|tpu
#   VLLM_PYTHON=python3.11   which interpreter: 3.11, for tpu 3.12       VLLM_VENV=.venv-vllm   where it goes
set -euo pipefail
cd "$(dirname "$0")/.."

PLATFORM=${1:-}
MINOR=11
[[ $PLATFORM = tpu ]] && MINOR=12  # each platform's wheels are for one
PYTHON=${VLLM_PYTHON:-python3.$MINOR}
VENV=${VLLM_VENV:-.venv-vllm}
REQUIREMENTS=tools/requirements/vllm-$PLATFORM.txt

[[ -f $REQUIREMENTS ]] || { echo "setup_vllm: which platform? bash tools/setup_vllm.sh cpu|cuda12|tpu" >&2; exit 2; }
"$PYTHON" -c "import sys; sys.exit(sys.version_info[:2] != (3, $MINOR))" 2>/dev/null || {
    echo "setup_vllm: $PYTHON is missing or not Python 3.$MINOR; name one: VLLM_PYTHON=/path/to/python3.$MINOR" >&2; exit 2; }

# The stamp holds what was installed: the environment is made anew only when that changes.
STAMP=$VENV/.installed
WANTED=$("$PYTHON" -V; cat "$REQUIREMENTS")
if [[ ! -f $STAMP ]] || [[ $(<"$STAMP") != "$WANTED" ]]; then
    echo "setup_vllm: making $VENV for $PLATFORM (2 GB on cpu, 8 to 11 GB on others; minutes)" >&2
    "$PYTHON" -m venv --clear "$VENV"
    # The files are complete: pip must not add what they leave out.
    "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps -r "$REQUIREMENTS"
    printf '%s\n' "$WANTED" > "$STAMP"
fi

[[ $PLATFORM != tpu ]] || echo "setup_vllm: note: vLLM on TPUs takes no per-request seed and reloads no weights, which" \
    "rollouts.engine=vllm needs: on TPUs a run samples with rollouts.engine=jax (docs/vllm.md)" >&2
