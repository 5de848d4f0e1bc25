"""Files of launch/, as far as they can be tried without what they are for: a cluster, a registry."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import kubernetes_validate
import pytest
from ruamel.yaml import YAML
from test_hosts import dapo_config, free_port, written

from sgpo_jax.config import load_config
from sgpo_jax.files import read_json, read_jsonl

REPO = Path(__file__).parents[1]
LAUNCH = REPO / "launch"
SLURM = Path(__file__).parent / "slurm"  # stand-ins for its programs
BIN = Path(sys.executable).parent
KUBERNETES = "1.34"  # whose schemas
LIMIT_S = 280

# Fields of JobSet's own that its API (jobset.x-k8s.io/v1alpha2, release 0.10) has, and what each holds.
JOBSET = {
    "replicatedJobs": list,
    "network": dict,
    "successPolicy": dict,
    "failurePolicy": dict,
    "suspend": bool,
    "coordinator": dict,
    "managedBy": str,
    "ttlSecondsAfterFinished": int,
}
REPLICATED_JOB = {"name": str, "groupName": str, "template": dict, "replicas": int, "dependsOn": list}
FAILURE_POLICY = {"maxRestarts": int, "restartStrategy": str, "rules": list}


def test_shell_scripts_have_no_known_mistakes():
    scripts = [*LAUNCH.glob("*.sh"), *(REPO / "tools").glob("*.sh"), REPO / ".ci" / "run"]
    scripts += [SLURM / "scancel", SLURM / "scontrol"]
    assert len(scripts) > 8
    checked = subprocess.run([BIN / "shellcheck", "-x", *scripts], cwd=REPO, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_dockerfiles_have_no_known_mistakes_and_copy_what_is_there():
    files = list(LAUNCH.glob("*.Dockerfile"))
    assert len(files) == 2
    checked = subprocess.run([BIN / "hadolint", *files], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    for file in files:
        copied = re.findall(r"^COPY (.+) \S+$", file.read_text(), re.MULTILINE)
        assert copied
        assert all((REPO / name).exists() for line in copied for name in line.split())


def test_every_command_of_the_launch_files_parses():
    """What follows `CONFIG` in them: configurations that are there, keys and values that the product has."""
    lines = [line for path in LAUNCH.iterdir() for line in path.read_text().replace("\\\n", " ").splitlines()]
    named = {name for line in lines for name in re.findall(r"configs/[\w.-]+\.yaml", line)}
    assert named
    for name in named:
        load_config(REPO / name)
    config = REPO / "configs" / "qwen2.5-math-7b-2-hosts.yaml"
    found = [text.rstrip(".,:;") for line in lines for text in re.findall(r"\b[a-z_]+\.[a-z_]+=[^\s\"]+", line)]
    overrides = [text for text in found if not text.startswith("key.sub=")]
    assert "hosts.bind=0.0.0.0:8476" in overrides
    for text in overrides:
        load_config(config, [re.sub(r"\$\(JOB_COMPLETION_INDEX\)", "1", re.sub(r"\$\(POD_IP\)|\$\w+", "node-1", text))])


def test_the_job_set_has_only_what_the_interfaces_have():
    jobset, policy = YAML(typ="safe").load_all((LAUNCH / "jobset.yaml").read_text())
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    (replicated,) = jobset["spec"]["replicatedJobs"]
    failure = jobset["spec"]["failurePolicy"]
    for tree, fields in ((jobset["spec"], JOBSET), (replicated, REPLICATED_JOB), (failure, FAILURE_POLICY)):
        assert all(isinstance(value, fields[key]) for key, value in tree.items())
    assert failure["restartStrategy"] in ("Recreate", "BlockingRecreate", "InPlaceRestart")
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "job"}, **replicated["template"]}
    kubernetes_validate.validate(job, KUBERNETES, strict=True)
    kubernetes_validate.validate(policy, KUBERNETES, strict=True)


def test_the_job_set_starts_one_run():
    """As many processes as the run has, each with a number, that find process 0 under the name JobSet gives it."""
    jobset, policy = YAML(typ="safe").load_all((LAUNCH / "jobset.yaml").read_text())
    name, (replicated,) = jobset["metadata"]["name"], jobset["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    command, config, *overrides = container["args"]
    assert command == "run"
    known = {"JOB_COMPLETION_INDEX": "1", "POD_IP": "10.0.0.2"}
    assert set(re.findall(r"\$\((\w+)\)", " ".join(overrides))) <= known.keys()
    assert "POD_IP" in {variable["name"] for variable in container["env"]}
    filled = [re.sub(r"\$\((\w+)\)", lambda found: known[found[1]], text) for text in overrides]
    run = load_config(REPO / config, filled)
    assert job["completions"] == job["parallelism"] == run.hosts.num_processes == run.hardware.num_hosts
    assert job["completionMode"] == "Indexed"
    assert run.hosts.process_id == 1
    host, _, port = run.hosts.coordinator.partition(":")
    assert host == f"{name}-{replicated['name']}-0-0.{name}"
    assert port == run.hosts.bind.partition(":")[2]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == run.hardware.devices_per_host
    mounts, volumes = container["volumeMounts"], job["template"]["spec"]["volumes"]
    assert {mount["name"] for mount in mounts} == {volume["name"] for volume in volumes}
    shared = [v["name"] for v in volumes if "persistentVolumeClaim" in v]
    assert any(run.run_dir.startswith(f"{m['mountPath']}/") for m in mounts if m["name"] in shared)
    labels = {"jobset.sigs.k8s.io/jobset-name": name}
    assert policy["spec"]["podSelector"]["matchLabels"] == labels
    assert policy["spec"]["ingress"] == [{"from": [{"podSelector": {"matchLabels": labels}}]}]


def slurm_job(directory: Path, python: str, *arguments: str) -> subprocess.Popen:
    """launch/slurm.sh as Slurm starts it, in a directory that then holds its logs. It leads a process group."""
    env = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "VLLM_API_KEY") and "_proxy" not in k.lower()}
    env |= {
        "PATH": f"{SLURM}:{env['PATH']}",
        "SLURM_JOB_ID": "77",
        "PYTHON": python,
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(REPO),
    }
    command = ["bash", str(LAUNCH / "slurm.sh"), *arguments]
    return subprocess.Popen(command, cwd=directory, env=env, start_new_session=True)


def end(job: subprocess.Popen, limit_s: float = LIMIT_S) -> int:
    try:
        return job.wait(limit_s)
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)


def program(directory: Path, text: str) -> str:
    """An interpreter for PYTHON that does something else with its arguments."""
    path = directory / "program"
    path.write_text(f"#!/usr/bin/env bash\n{text}\n")
    path.chmod(0o755)
    return shlex.quote(str(path))


@pytest.mark.slow
def test_slurm_makes_one_run_of_its_tasks(tmp_path):
    config = dapo_config(tmp_path / "run")
    one_step = f'data.train=[{{"path":"{config.data.train[0].path}","max_queries":4}}]'
    overrides = [f"hosts.bind=127.0.0.1:{free_port()}", one_step]
    job = slurm_job(tmp_path, shlex.quote(sys.executable), str(written(config)), *overrides)
    code = end(job)
    leader, follower = ((tmp_path / f"slurm-77-{number}.log").read_text() for number in range(2))
    assert code == 0, leader + follower
    assert len(read_jsonl(tmp_path / "run" / "metrics.jsonl")) == 1
    assert read_json(tmp_path / "run" / "compute.json")
    assert (tmp_path / "run" / ".hosts").exists(), "two processes"
    assert leader
    assert not follower


def test_slurm_ends_all_tasks_when_one_fails(tmp_path):
    """Each has its own host's name and the one key, which no command line shows."""
    what = 'printf "%s\\n" "$@" > "arguments-$SLURM_PROCID"; echo "$VLLM_API_KEY" > "key-$SLURM_PROCID"\n'
    fails = "if ((SLURM_PROCID)); then until [[ -s key-0 ]]; do sleep 0.05; done; exit 3; fi\n"  # the other has begun
    fake = program(tmp_path, what + fails + "exec sleep 600")
    assert end(slurm_job(tmp_path, fake, "CONFIG", "run_dir=with a space"), 30) != 0
    keys = [(tmp_path / f"key-{number}").read_text().strip() for number in range(2)]
    assert keys[0] == keys[1]
    assert re.fullmatch("[0-9a-f]{64}", keys[0])
    for number in range(2):
        arguments = (tmp_path / f"arguments-{number}").read_text().splitlines()
        assert arguments[:4] == ["-m", "sgpo_jax.launch", "run", "CONFIG"]
        assert f"vllm.host=127.0.0.{number + 1}" in arguments
        assert arguments[-1] == "run_dir=with a space"
        assert not any(keys[0] in argument for argument in arguments)
    assert not (tmp_path / "scontrol.said").exists(), "a failure does not queue it again"


@pytest.mark.parametrize(("code", "said"), [(1, "requeue 77\n"), (0, None)])
def test_slurm_queues_a_job_again_that_its_time_limit_ended(tmp_path, code, said):
    """The tasks are terminated, and their end is awaited; one that finished meanwhile is done."""
    fake = program(tmp_path, f'trap "echo ended; exit {code}" TERM; sleep 600 & echo > "up-$SLURM_PROCID"; wait')
    job = slurm_job(tmp_path, fake, "CONFIG")
    until = time.monotonic() + 30
    while len(list(tmp_path.glob("up-*"))) < 2 or not (tmp_path / "srun.pid").exists():
        assert time.monotonic() < until
        time.sleep(0.05)
    job.send_signal(signal.SIGUSR1)
    assert end(job, 30) == code
    assert [path.read_text() for path in sorted(tmp_path.glob("slurm-77-*.log"))] == ["ended\n"] * 2
    told = tmp_path / "scontrol.said"
    assert (told.read_text() if told.exists() else None) == said


def test_a_process_under_slurm_keeps_all_devices_of_its_host(tmp_path):
    """JAX alone would take one GPU for each task."""
    script = (
        "from jax._src.xla_bridge import CUDA_VISIBLE_DEVICES\n"
        "from sgpo_jax.config import HostsConfig\nfrom sgpo_jax.hosts import messages\n"
        f"messages.start(HostsConfig(num_processes=None, bind='127.0.0.1:{free_port()}'))\n"
        "print(messages.num_processes(), CUDA_VISIBLE_DEVICES.value)\n"
    )
    task = {"NTASKS": "1", "PROCID": "0", "LOCALID": "0", "JOB_ID": "77", "STEP_NODELIST": "localhost"}
    env = os.environ | {f"SLURM_{name}": value for name, value in task.items()} | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["1", "all"], done.stderr
