#!/usr/bin/env bash
# Trains on one host with NVIDIA GPUs: makes both environments where they are missing, checks, runs. Run it again, and it
# goes on where it stood.
#   bash launch/one_host.sh configs/qwen2.5-math-7b.yaml [key.sub=value ...]
# What the hub has and this host does not is fetched when the run begins. ENGINE=jax leaves vLLM's environment out, for
# rollouts.engine=jax. PYTHON, VLLM_PYTHON: as in tools/setup.sh and tools/setup_vllm.sh.
set -euo pipefail
cd "$(dirname "$0")/.."

[[ $# -gt 0 ]] || { echo "one_host: which configuration? bash launch/one_host.sh CONFIG [key.sub=value ...]" >&2; exit 2; }
export PLATFORM=${PLATFORM:-cuda12}
. tools/setup.sh
[[ ${ENGINE:-vllm} = jax ]] || bash tools/setup_vllm.sh "$PLATFORM"
"$VENV_PYTHON" -m sgpo_jax.launch check --allow-missing "$@"
exec "$VENV_PYTHON" -m sgpo_jax.launch run "$@"
