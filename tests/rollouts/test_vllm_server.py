"""The server's process, with a fake server: start, errors, end, and what is left behind (nothing)."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers import make_config
from vllm_helpers import FAKE, ask_fake, fake_engine, server_of

from sgpo_jax.rollouts.vllm_server import VLLMServer, _free_port
from sgpo_jax.rollouts.vllm_watchdog import session_members
from sgpo_jax.types import MachineError, UserError


def wait_for(condition, what, limit_s=20.0):
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.05)


def new_directory(path: Path) -> Path:
    path.mkdir()
    return path


def shared_memory_in(log: Path) -> list[Path]:
    """What the fake's child holds, once it does: a segment and a semaphore."""
    wait_for(lambda: "shared memory" in log.read_text(), "the child did not start")
    names = re.search(r"shared memory (\S+) (\S+)", log.read_text())
    files = [Path("/dev/shm") / name for name in names.groups()]
    assert all(file.exists() for file in files)
    return files


def test_the_servers_options_and_environment(tmp_path):
    options = {
        "command": ["/nowhere/vllm/bin/python", "-m", "server"],
        "platform": "cpu",
        "kv_cache_gib": 3,
        "devices": [4, 5],
        "memory_frac": 0.5,
        "tensor_parallel": 2,
        "extra_args": ["--swap-space", "0"],
        "env": {"OMP_NUM_THREADS": "2"},
    }
    config = make_config(vllm=options).vllm
    server = VLLMServer(config, dtype="bfloat16", max_model_len=20_000, scratch=tmp_path, log=tmp_path / "log")
    arguments = " ".join(server._arguments(tmp_path / "weights-1"))
    for expected in (
        f"--model {tmp_path}/weights-1 --served-model-name policy --host 127.0.0.1 --port ",
        "--dtype bfloat16 --max-model-len 20000 ",
        "--max-num-batched-tokens 20000 --tensor-parallel-size 2 --data-parallel-size 1",
        "--generation-config vllm --logprobs-mode processed_logprobs --middleware vllm_guard.Guard",
        "--gpu-memory-utilization 0.5",
    ):
        assert expected in arguments
    assert arguments.endswith("--enforce-eager --no-enable-chunked-prefill --swap-space 0")
    assert server.key not in arguments, "other users see command lines"
    environment = server._environment()
    expected_environment = {
        "VLLM_API_KEY": server.key,
        "VLLM_CPU_KVCACHE_SPACE": "3",
        "VLLM_SERVER_DEV_MODE": "1",
        "CUDA_VISIBLE_DEVICES": "4,5",
        "OMP_NUM_THREADS": "2",
    }
    assert environment.items() >= expected_environment.items()
    assert [file.name for file in Path(environment["PYTHONPATH"]).iterdir()] == ["vllm_guard.py"]


def test_nothing_is_left_after_the_end_not_even_a_stubborn_child(tmp_path):
    weights = new_directory(tmp_path / "weights")
    with fake_engine(tmp_path, env={"FAKE_CHILD": "1"}, weights_dir=str(weights)) as engine:
        session = server_of(engine)._process.pid
        assert len(session_members(session)) >= 2
        assert os.stat(engine._weights.path).st_mode & 0o777 == 0o700
        memory = shared_memory_in(tmp_path / "vllm.log")
    assert session_members(session) == []
    assert not Path(f"/proc/{session}").exists()
    assert not any(file.exists() for file in memory)
    assert not list(weights.iterdir())


def start_run(tmp_path, **env: str) -> subprocess.Popen:
    """A process that has a fake engine and waits; it prints the server's session and the directory of the weights."""
    script, weights = tmp_path / "run.py", new_directory(tmp_path / "weights")
    script.write_text(
        f"import sys; sys.path[:0] = [{str(Path(__file__).parents[1])!r}]\n"
        "from pathlib import Path\nfrom vllm_helpers import fake_engine, server_of\n"
        f"with fake_engine(Path({str(tmp_path)!r}), env={env!r}, weights_dir={str(weights)!r}) as engine:\n"
        "    print(server_of(engine)._process.pid, engine._weights.path, flush=True)\n"
        "    sys.stdin.read()\n"
    )
    command = [sys.executable, str(script)]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )


@pytest.mark.parametrize("end", ["run killed", "watchdog killed", "interrupted"])
def test_nothing_is_left_however_the_run_ends(tmp_path, end):
    """SIGKILL cannot be handled: the run's end is seen by the watchdog, the watchdog's by the run."""
    with start_run(tmp_path, FAKE_CHILD="1") as run:
        session, scratch = run.stdout.readline().split()
        assert len(session_members(int(session))) >= 2
        memory = shared_memory_in(tmp_path / "vllm.log")
        if end == "interrupted":
            run.send_signal(signal.SIGINT)
        else:
            os.kill(run.pid if end == "run killed" else int(session), signal.SIGKILL)
        run.stdin.close()
        run.wait(60)
        wait_for(lambda: not session_members(int(session)), "processes are left", limit_s=40)
        wait_for(lambda: not Path(scratch).exists(), "the weights are left")
        wait_for(lambda: not any(file.exists() for file in memory), "shared memory is left")


def test_an_interrupted_start_leaves_nothing(tmp_path):
    log = tmp_path / "vllm.log"
    with start_run(tmp_path, FAKE_START_DELAY="60") as run:
        wait_for(lambda: log.exists() and "fake vLLM" in log.read_text(), "the server did not start")
        time.sleep(0.5)
        assert list((tmp_path / "weights").iterdir())
        run.send_signal(signal.SIGINT)
        assert run.wait(30) != 0
    assert not list((tmp_path / "weights").iterdir())
    assert not [entry for entry in Path("/proc").glob("[0-9]*/cmdline") if str(tmp_path) in read_or_nothing(entry)]


def read_or_nothing(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def test_a_port_in_use_is_named(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=rf"vllm.port={port}: cannot be used: Address already in use; name another"):
            fake_engine(tmp_path, port=port).__enter__()


def test_a_server_that_ends_at_once_is_an_error_with_its_cause_and_last_words(tmp_path):
    command = [sys.executable, "-c", "print('ValueError: no such device'); print('more\\n' * 20, 'the end')"]
    message = r"ended before it was healthy \(ValueError: no such device\); .*vllm\.log ends with: more .* the end"
    with pytest.raises(MachineError, match=message):
        fake_engine(tmp_path, command=command).__enter__()


def test_a_server_that_is_never_healthy_is_ended_at_the_limit(tmp_path):
    begun = time.monotonic()
    with pytest.raises(MachineError, match=r"was not healthy within vllm.start_time_limit_s=8; .* fake vLLM"):
        fake_engine(tmp_path, start_time_limit_s=8, env={"FAKE_START_DELAY": "60"}).__enter__()
    assert time.monotonic() - begun < 30


def test_an_address_where_no_server_answers_is_named_at_the_limit(tmp_path):
    url = f"http://127.0.0.1:{_free_port()}"
    with pytest.raises(MachineError, match=rf"{url}: was not healthy within vllm.start_time_limit_s=1$"):
        fake_engine(tmp_path, urls=[url], start_time_limit_s=1).__enter__()


@pytest.mark.parametrize("version", ["0.31.2", "0.34.0", "1.0"])
def test_versions_beyond_the_range_are_refused(tmp_path, version):
    with pytest.raises(UserError, match=rf"vLLM {version} is not supported; allowed is 0.32 or newer, older than 0.34"):
        fake_engine(tmp_path, env={"FAKE_VERSION": version}).__enter__()


def test_a_slow_start_is_waited_for(tmp_path):
    with fake_engine(tmp_path, env={"FAKE_START_DELAY": "1"}) as engine:
        assert ask_fake(server_of(engine).url)["paused"] is False
    assert FAKE[1] in (tmp_path / "vllm.log").read_text()
