# A vLLM server for `vllm.urls`, from the pinned requirements, with the guard that the trainer's own servers have: every
# endpoint but /health wants the key in VLLM_API_KEY, without which it does not start.
#   docker build -f launch/sidecar.Dockerfile -t sgpo-sidecar .
#   docker run --gpus all -e VLLM_API_KEY sgpo-sidecar --model DIR --dtype bfloat16 --max-model-len 4096
FROM python:3.11-slim-bookworm

# vLLM compiles its kernels' launchers when it starts.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --no-install-recommends -y gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /sidecar
COPY tools/setup_vllm.sh tools/setup_vllm.sh
COPY tools/requirements/vllm-cuda12.txt tools/requirements/vllm-cuda12.txt
RUN bash tools/setup_vllm.sh cuda12
COPY sgpo_jax/rollouts/vllm_guard.py guard/vllm_guard.py
ENV PYTHONPATH=/sidecar/guard VLLM_SERVER_DEV_MODE=1 VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1

EXPOSE 8000
# What the trainer counts on; the model, its type and length follow. A sidecar shares its trainer's loopback interface:
# other hosts reach it only where --host says so.
ENTRYPOINT ["/sidecar/.venv-vllm/bin/python", "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", "8000", "--served-model-name", "policy", "--generation-config", "vllm", "--logprobs-mode", "processed_logprobs", "--middleware", "vllm_guard.Guard", "--seed", "0"]
