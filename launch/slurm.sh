#!/usr/bin/env bash
# Trains on N hosts of 8 NVIDIA GPUs under Slurm, one process a host. From this project's directory on a disk that all
# hosts share, with the environments made there (tools/setup.sh, tools/setup_vllm.sh):
#   sbatch --nodes=2 --time=24:00:00 launch/slurm.sh configs/qwen2.5-math-7b-2-hosts.yaml [key.sub=value ...]
# Ended by the time limit or preempted, the job goes back into the queue and resumes; after a failure, sbatch again
# resumes. What process N says is in slurm-JOB-N.log.
#   PYTHON       what runs Python on each host (default: .venv-cuda/bin/python)
#   SRUN_ARGS    further arguments of srun
#   VLLM_API_KEY the key of vLLM's servers (default: a new one)
# In a container, here that of launch/trainer.Dockerfile, with a run_dir that is mounted:
#   pyxis        PYTHON=python SRUN_ARGS='--container-image=IMAGE --container-mounts=/shared' sbatch ...
#   Apptainer    PYTHON='apptainer exec --nv --pwd /sgpo --bind /shared IMAGE.sif python' sbatch ...
#SBATCH --job-name=sgpo
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --requeue
#SBATCH --signal=B:USR1@120
#SBATCH --output=slurm-%j.log
#SBATCH --open-mode=append
set -euo pipefail

[[ $# -gt 0 ]] || { echo "slurm: which configuration? sbatch --nodes=N launch/slurm.sh CONFIG [key.sub=value ...]" >&2; exit 2; }
# The processes have it from their environment: a command line is open to all users of a host.
[[ -n ${VLLM_API_KEY:-} ]] || VLLM_API_KEY=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
export VLLM_API_KEY PYTHON=${PYTHON:-.venv-cuda/bin/python}

# Two minutes before the time limit: the processes end, then the job is queued again.
time_is_up=
trap 'time_is_up=1; scancel --signal=TERM "$SLURM_JOB_ID"' USR1

# Each host's own: its name, where its vLLM server listens if it has one. Values of the caller come last, and count.
# shellcheck disable=SC2016
process='config=$1; shift
exec $PYTHON -m sgpo_jax.launch run "$config" hosts.num_processes=null hosts.bind=0.0.0.0:8476 \
    "vllm.host=$SLURMD_NODENAME" "$@"'
# shellcheck disable=SC2086
srun --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=1 --export=ALL \
    --output="slurm-$SLURM_JOB_ID-%t.log" --open-mode=append ${SRUN_ARGS:-} bash -c "$process" process "$@" &
step=$!

code=0
wait "$step" || code=$?
while kill -0 "$step" 2>/dev/null; do  # the signal ended the wait alone
    code=0
    wait "$step" || code=$?
done
if [[ -n $time_is_up ]] && ((code != 0)); then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
