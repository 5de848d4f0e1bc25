#!/usr/bin/env bash
# Makes the environment of this project, once: source it (". tools/setup.sh") to get $VENV_PYTHON.
#   PYTHON=python3.12   which interpreter (>= 3.11)       PLATFORM=cpu|cuda12|tpu   which pinned requirements
#   VENV=.venv          where the environment goes
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PYTHON=${PYTHON:-python3}
PLATFORM=${PLATFORM:-cpu}
VENV=${VENV:-.venv}
REQUIREMENTS=tools/requirements/$PLATFORM.txt
VENV_PYTHON=$PWD/$VENV/bin/python
[[ $VENV = /* ]] && VENV_PYTHON=$VENV/bin/python

"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || {
    echo "setup: $PYTHON is missing or older than Python 3.11; name another: PYTHON=/path/to/python3.12" >&2; exit 2; }
[[ -f $REQUIREMENTS ]] || {
    echo "setup: no $REQUIREMENTS; PLATFORM is one of: $(cd tools/requirements && echo *.txt)" >&2; exit 2; }

[[ ! -e $VENV || -f $VENV/pyvenv.cfg ]] || {
    echo "setup: VENV=$VENV is there and is no virtual environment; name another" >&2; exit 2; }

# The stamp holds what was installed: the environment is made anew only when that changes.
STAMP=$VENV/.installed
WANTED=$("$PYTHON" -V; cat "$REQUIREMENTS" pyproject.toml)
if [[ ! -f $STAMP ]] || [[ $(<"$STAMP") != "$WANTED" ]]; then
    echo "setup: making $VENV for $PLATFORM (about 2 minutes)" >&2
    "$PYTHON" -m venv --clear "$VENV"
    "$VENV_PYTHON" -m pip install --quiet --disable-pip-version-check -r "$REQUIREMENTS"
    "$VENV_PYTHON" -m pip install --quiet --disable-pip-version-check --no-deps --editable .
    printf '%s\n' "$WANTED" > "$STAMP"
fi
