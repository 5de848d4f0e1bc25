"""Which GPUs go to whom, and what JAX and the server are told; the GPUs themselves are only numbers here."""

import subprocess
import sys
from types import SimpleNamespace

import jax
import pytest
from helpers import make_config
from jax._src import xla_bridge
from jaxlib import xla_client

from sgpo_jax.rollouts.placement import check_server, claim, num_gpus, place, visible_devices
from sgpo_jax.types import MachineError, UserError

GPUS, CPUS = {}, {"JAX_PLATFORMS": "cpu"}  # environments of the trainer


def placed(count, vllm=None, mesh=None, engine="vllm", environment=GPUS):
    config = place(make_config(rollouts={"engine": engine}, vllm=vllm or {}, mesh=mesh or {}), count, environment)
    return config.mesh.devices, config.vllm.devices, config.vllm.data_parallel


@pytest.mark.parametrize(
    ("count", "vllm", "mesh", "expected"),
    [
        (8, {}, {}, ((0, 1, 2, 3), (4, 5, 6, 7), 4)),
        (8, {"tensor_parallel": 2}, {}, ((0, 1, 2, 3), (4, 5, 6, 7), 2)),
        (3, {}, {}, ((0, 1), (2,), 1)),
        (8, {"devices": [0, 5]}, {}, ((1, 2, 3, 4, 6, 7), (0, 5), 2)),
        (4, {}, {"devices": [3]}, ((3,), (0, 1, 2), 3)),
        (4, {"devices": [0]}, {"devices": [3]}, ((3,), (0,), 1)),
    ],
)
def test_split_gives_each_its_own(count, vllm, mesh, expected):
    assert placed(count, vllm, mesh) == expected


@pytest.mark.parametrize(
    ("count", "vllm", "expected"),
    [(1, {}, ((), (0,), 1)), (4, {"tensor_parallel": 2}, ((), (0, 1, 2, 3), 2)), (4, {"devices": [2]}, ((), (2,), 1))],
)
def test_a_trainer_on_cpus_leaves_the_server_all_gpus(count, vllm, expected):
    assert placed(count, vllm, environment=CPUS) == expected


SHARED = {"placement": "shared"}


@pytest.mark.parametrize(
    ("count", "vllm", "mesh", "expected"),
    [
        (1, {}, {}, ((0,), (0,), 1)),
        (4, {"tensor_parallel": 2}, {}, ((0, 1, 2, 3), (0, 1, 2, 3), 2)),
        (4, {"devices": [1, 2]}, {}, ((1, 2), (1, 2), 2)),
        (4, {"memory_frac": 0.95}, {"devices": [3]}, ((3,), (3,), 1)),
    ],
)
def test_shared_gives_both_the_same(count, vllm, mesh, expected):
    assert placed(count, SHARED | vllm, mesh) == expected


@pytest.mark.parametrize(
    ("count", "vllm", "mesh", "message"),
    [
        (8, {"devices": [3, 4]}, {"devices": [4, 5]}, r"GPUs \[4\] are in mesh.devices and in vllm.devices"),
        (1, {}, {}, "of 1 GPUs, 1 are left to the trainer and 0 to the server; .*shared, or .* JAX_PLATFORMS=cpu"),
        (2, {"devices": [0, 1]}, {}, "0 are left to the trainer and 2 to the server"),
        (4, {"devices": [4]}, {}, r"vllm.devices=\[4\]: this process sees 4 GPUs, numbered from 0"),
        (4, {"devices": [1, 1]}, {}, r"vllm.devices=\[1, 1\]: names a GPU twice"),
        (8, {"tensor_parallel": 3}, {}, "vllm.tensor_parallel=3 x vllm.data_parallel=1: the server has 4 GPUs"),
        (8, {"data_parallel": 2}, {}, "vllm.data_parallel=2: the server has 4 GPUs"),
        (1, SHARED, {"memory_frac": 0.6}, "mesh.memory_frac=0.6: with vllm.placement=shared the trainer takes"),
        (1, SHARED | {"memory_frac": 0.96}, {}, "vllm.memory_frac=0.96: with vllm.placement=shared at most 0.95"),
        (2, SHARED | {"devices": [0]}, {"devices": [1]}, "must be the same"),
        (2, SHARED | {"urls": ["http://127.0.0.1:1"]}, {}, "only with a server that the run starts"),
        (2, SHARED | {"platform": "cpu"}, {}, "only with a server that the run starts itself, on"),
    ],
)
def test_what_cannot_be_is_refused_by_name(count, vllm, mesh, message):
    with pytest.raises(UserError, match=message):
        placed(count, vllm, mesh)


@pytest.mark.parametrize(
    ("vllm", "mesh", "message"),
    [
        (SHARED, {}, "vllm.placement=shared: gives the trainer GPUs, but JAX_PLATFORMS=cpu has JAX run on CPUs"),
        ({}, {"devices": [1]}, r"mesh.devices=\[1\]: gives the trainer GPUs, but JAX_PLATFORMS=cpu"),
    ],
)
def test_a_trainer_on_cpus_is_given_no_gpus(vllm, mesh, message):
    with pytest.raises(UserError, match=message):
        placed(2, vllm, mesh, environment=CPUS)


@pytest.mark.parametrize(
    ("vllm", "engine"),
    [({"urls": ["http://127.0.0.1:1"]}, "vllm"), ({"platform": "cpu"}, "vllm"), ({}, "jax"), (SHARED, "jax")],
)
def test_without_a_server_on_gpus_nothing_is_placed(vllm, engine):
    assert placed(0, vllm, engine=engine) == ((), (), None)


def test_gpus_are_counted_without_cuda(tmp_path):
    for name in ("nvidia0", "nvidia1", "nvidia10", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert num_gpus({}, tmp_path) == 3
    assert num_gpus({"CUDA_VISIBLE_DEVICES": "4, 7"}, tmp_path) == 2
    assert num_gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == 0


def test_on_a_machine_without_gpus_only_a_server_is_refused():
    config = place(make_config(rollouts={"engine": "vllm"}, vllm={"devices": [4]}), 0, GPUS)
    assert (config.mesh.devices, config.vllm.devices) == ((), (4,)), "a plan needs none"
    with pytest.raises(UserError, match=r"vllm.platform=cuda: this process sees no GPU"):
        check_server(config.vllm, 0)
    check_server(config.vllm, 1)
    check_server(make_config(vllm={"platform": "cpu"}).vllm, 0)
    check_server(make_config(vllm={"urls": ["http://127.0.0.1:8000"]}).vllm, 0)


def test_numbers_count_among_the_gpus_that_this_process_sees():
    assert visible_devices([0, 2], {}) == "0,2"
    assert visible_devices([0, 2], {"CUDA_VISIBLE_DEVICES": "4,5,GPU-8d2e"}) == "4,GPU-8d2e"


def test_jax_is_told_its_share_under_the_name_that_it_reads(monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.8")
    claim(make_config(mesh={"memory_frac": 0.35}))
    assert xla_client.generate_pjrt_gpu_plugin_options()["memory_fraction"] == 0.35


ALLOCATION = ("XLA_PYTHON_CLIENT_ALLOCATOR", "XLA_PYTHON_CLIENT_PREALLOCATE")


@pytest.fixture
def started(monkeypatch):
    """JAX as if it started on GPUs 1 and 3; gives a list of the options that its plugin had when it did."""
    options = []

    def start():
        gpus = xla_bridge._options_from_jax_configs("cuda")["visible_devices"]
        options.append({**xla_client.generate_pjrt_gpu_plugin_options(), "visible_devices": gpus})
        return "gpu"

    for name in ALLOCATION:
        monkeypatch.setenv(name, "")  # so that what a test sets is undone
        monkeypatch.delenv(name)
    monkeypatch.setattr(jax, "default_backend", start)
    monkeypatch.setattr(jax, "local_devices", lambda: [SimpleNamespace(local_hardware_id=number) for number in (1, 3)])
    yield options
    jax.config.update("jax_cuda_visible_devices", "all")


def configured(placement, devices):
    return make_config(rollouts={"engine": "vllm"}, vllm={"placement": placement}, mesh={"devices": devices})


def test_jax_starts_on_its_gpus_and_with_shared_ones_gives_memory_back(started):
    claim(configured("split", [3, 1]))
    claim(configured("shared", [1, 3]))
    split, shared = started
    assert (split["visible_devices"], shared["visible_devices"]) == ([3, 1], [1, 3])
    assert (split["allocator"], split.get("preallocate")) == ("default", None)
    assert (shared["allocator"], shared["preallocate"]) == ("cuda_async", False)


@pytest.mark.parametrize(("name", "value"), [(ALLOCATION[0], "platform"), (ALLOCATION[1], "true")])
def test_an_environment_that_has_jax_keep_shared_memory_is_refused(started, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    claim(configured("split", [1, 3]))
    with pytest.raises(UserError, match=f"{name}={value}: with vllm.placement=shared .* unset it"):
        claim(configured("shared", [1, 3]))
    assert len(started) == 1, "refused before JAX starts"


def test_it_is_too_late_where_jax_had_started_on_other_gpus(started):
    with pytest.raises(MachineError, match=r"mesh.devices=\[0, 1\]: JAX had started on GPUs \[1, 3\] before"):
        claim(configured("split", [0, 1]))


def test_gpus_without_a_jax_for_them_are_refused():
    try:
        with pytest.raises(UserError, match=r"mesh.devices=\[1, 3\]: GPUs are meant .* JAX runs on cpu; install"):
            claim(configured("split", [1, 3]))
    finally:
        jax.config.update("jax_cuda_visible_devices", "all")


def test_a_run_has_not_used_a_device_before_it_claims_its_own(tmp_path):
    script = f"""
from jax._src import xla_bridge
from sgpo_jax import pipeline, run
from sgpo_jax.config import parse_config
found = []
run.claim = lambda config: found.append(xla_bridge.backends_are_initialized())
tree = {{"run_dir": {str(tmp_path)!r}, "model": {{"path": "unused"}}, "data": {{"train": [{{"path": "unused"}}]}}}}
with run.open_run(parse_config(tree, "test")):
    found.append(xla_bridge.backends_are_initialized())
assert found == [False, True], found
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
