#!/usr/bin/env bash
# Tries this project on one NVIDIA GPU, in at most 5 minutes: see tools/gpu_smoke.py.
#   bash tools/gpu_smoke.sh             on the GPU; arguments go to gpu_smoke.py (--toy: a toy model, on any machine)
#   bash tools/gpu_smoke.sh --wheels    beforehand, where pip reaches an index: gathers in wheels/ what an image lacks that
#                                       has jax, flax, optax, chex, orbax-checkpoint, safetensors and numpy, but no network;
#                                       carry the repository there with it. Further NAME==VERSION are gathered too.
#   PYTHON=python3        which interpreter           PYTHON_VERSION=3.12       of the image that wheels are for
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}
WHEELS=wheels
LACKING='pydantic|pydantic-core|annotated-types|typing-inspection|typing-extensions|ruamel-yaml'

if [[ ${1:-} = --wheels ]]; then
    shift
    platforms=()
    for glibc in 2_28 2_17 2_12 2_5; do platforms+=(--platform "manylinux_${glibc}_x86_64"); done
    rm -rf "$WHEELS"
    # shellcheck disable=SC2046  # a word for each requirement
    "$PYTHON" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --dest "$WHEELS" \
        --implementation cp --python-version "${PYTHON_VERSION:-3.12}" \
        "${platforms[@]}" --platform manylinux2014_x86_64 --platform manylinux1_x86_64 \
        $(grep -E "^($LACKING)==" tools/requirements/cuda12.txt | cut -d ' ' -f 1) "$@"
    du -sh "$WHEELS"
    exit
fi

if [[ -d $WHEELS ]]; then
    site=$(mktemp -d)
    trap 'rm -rf "$site"' EXIT
    "$PYTHON" -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-compile --target "$site" "$WHEELS"/*.whl
fi
export PYTHONPATH=$PWD${site:+:$site}${PYTHONPATH:+:$PYTHONPATH}
timeout --kill-after=5 295 "$PYTHON" tools/gpu_smoke.py "$@"
