# The trainer: this project and JAX for NVIDIA GPUs, from the pinned requirements. The driver comes from the host.
#   docker build -f launch/trainer.Dockerfile -t sgpo-trainer .
FROM python:3.11-slim-bookworm

WORKDIR /sgpo
COPY pyproject.toml README.md LICENSE ./
COPY tools/setup.sh tools/setup.sh
COPY tools/requirements tools/requirements
COPY sgpo_jax sgpo_jax
RUN PLATFORM=cuda12 bash tools/setup.sh
COPY configs configs
ENV PATH=/sgpo/.venv/bin:$PATH

# Weights, data and runs are mounted. As the owner of the mounted directories: docker run --user
ENTRYPOINT ["python", "-m", "sgpo_jax.launch"]
CMD ["--help"]
