# The trainer: this project and JAX for NVIDIA GPUs, from the pinned requirements. The driver comes from the host.
#   docker build -f launch/trainer.Dockerfile -t sgpo-trainer .
# With vLLM's environment beside it, for rollouts.engine=vllm: --build-arg VLLM=yes.
FROM python:3.11-slim-bookworm

WORKDIR /sgpo
COPY pyproject.toml README.md LICENSE ./
COPY tools/setup.sh tools/setup.sh
COPY tools/requirements tools/requirements
COPY sgpo_jax sgpo_jax
RUN PLATFORM=cuda12 bash tools/setup.sh
# vLLM compiles its kernels' launchers when it starts.
ARG VLLM=
COPY tools/setup_vllm.sh tools/setup_vllm.sh
# hadolint ignore=DL3008
RUN if [ -n "$VLLM" ]; then \
        apt-get update && apt-get install --no-install-recommends -y gcc libc6-dev && rm -rf /var/lib/apt/lists/* \
        && bash tools/setup_vllm.sh cuda12; \
    fi
COPY configs configs
ENV PATH=/sgpo/.venv/bin:$PATH

# Weights, data and runs are mounted. As the owner of the mounted directories: docker run --user
ENTRYPOINT ["python", "-m", "sgpo_jax.launch"]
CMD ["--help"]
