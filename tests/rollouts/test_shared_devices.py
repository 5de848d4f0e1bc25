"""placement=shared over the fake server. A real vLLM sleeps on GPUs alone: only one shows what memory that frees."""

import os
import signal
import time

import jax
import pytest
from flax import nnx
from helpers import make_config, make_query, tiny_architecture, tiny_model
from vllm_helpers import ask_fake, bigram_logprobs, bigram_probe, fake_engine, model_dir, server_of

from sgpo_jax.models.sharding import park
from sgpo_jax.rollouts.turns import SharedDevices
from sgpo_jax.rollouts.vllm_server import VLLMServer
from sgpo_jax.rollouts.vllm_watchdog import session_members
from sgpo_jax.rollouts.vllm_weights import WeightsDirectory
from sgpo_jax.types import GroupRequest, MachineError, Purpose, SamplingParams

SHARED = {"placement": "shared", "platform": "cuda", "memory_frac": 0.4}
ASLEEP = ["/sleep"]
AWAKE = ["/wake_up", "/pause", "/collective_rpc", "/reset_prefix_cache", "/resume", "/v1/completions"]


def calls(engine) -> list[str]:
    """In their order, those that follow each other counted once."""
    found = ask_fake(server_of(engine).url)["calls"]
    return [call for call, before in zip(found, [None, *found], strict=False) if call != before]


def update(engine, turns, seed, version):
    """What the training loop does after an update; gives back the parked weights."""
    model = tiny_model(seed=seed)
    params = turns.sampler(nnx.state(model))
    return params, engine.update_weights(params, version, bigram_probe(tiny_model(seed=seed)))


def generate(engine):
    requests = [GroupRequest(make_query("q", (1, 2, 5)), 2, Purpose.TRAIN)]
    [group] = engine.generate(requests, SamplingParams(12))
    return group.completions


def test_the_server_sleeps_while_the_trainer_works_and_gets_the_weights_once_awake(tmp_path):
    with fake_engine(tmp_path, **SHARED) as engine:
        turns = SharedDevices(engine)
        generate(engine)
        before = len(calls(engine))
        turns.trainer({})
        assert calls(engine)[before:] == ASLEEP
        assert ask_fake(server_of(engine).url)["asleep"] is True
        params, figures = update(engine, turns, seed=9, version=3)
        assert {x.sharding.memory_kind for x in jax.tree.leaves(params) if x.ndim} == {"pinned_host"}
        assert calls(engine)[before:] == ASLEEP + AWAKE, "the probe is asked as a completion"
        assert figures["sync/num_failures"] == 0
        [first, _] = generate(engine)
        assert first.policy_version == 3
        expected = bigram_logprobs(tiny_model(seed=9), 5)[first.token_ids_C[0]]
        assert first.sampler_logprobs_C[0] == pytest.approx(expected, abs=1e-4)
        before = len(calls(engine))
        update(engine, turns, seed=2, version=4)
        assert "/wake_up" not in calls(engine)[before:], "it is awake"
        assert generate(engine)[0].policy_version == 4


def test_memory_is_given_back_once_the_arrays_have_left_it(tmp_path, monkeypatch):
    params = nnx.state(tiny_model())
    left = []
    monkeypatch.setattr(
        "sgpo_jax.rollouts.turns.release_unused",
        lambda: left.append(all(x.is_deleted() for x in jax.tree.leaves(params) if x.ndim)),
    )
    SharedDevices(engine=None).sampler(params)
    assert left == [True]


@pytest.mark.parametrize("fault", ["fail_wake", "killed"])
def test_a_server_lost_in_its_sleep_is_started_again_awake(tmp_path, fault):
    with fake_engine(tmp_path, **SHARED) as engine:
        turns = SharedDevices(engine)
        turns.trainer({})
        if fault == "killed":
            for pid in session_members(server_of(engine)._process.pid):
                os.kill(pid, signal.SIGKILL)
        else:
            ask_fake(server_of(engine).url, fail_wake=1)
        _, figures = update(engine, turns, seed=9, version=1)
        assert figures["sync/num_failures"] == 1
        assert ask_fake(server_of(engine).url)["asleep"] is False
        assert generate(engine)[0].policy_version == 1
        assert (tmp_path / "vllm.log").read_text().count("fake vLLM") == 2


def test_a_server_that_cannot_sleep_is_ended_so_that_the_trainer_has_the_devices(tmp_path):
    with fake_engine(tmp_path, **SHARED) as engine:
        turns = SharedDevices(engine)
        ask_fake(server_of(engine).url, fail_sleep=1)
        turns.trainer({})
        assert not server_of(engine).is_running
        update(engine, turns, seed=9, version=1)
        assert generate(engine)[0].policy_version == 1


def test_a_server_that_hangs_on_its_way_to_sleep_is_ended_at_the_limit(tmp_path):
    with fake_engine(tmp_path, sync_time_limit_s=5.0, **SHARED) as engine:
        ask_fake(server_of(engine).url, hang_sleep=1)
        begun = time.monotonic()
        engine.sleep()
        assert time.monotonic() - begun < 20
        assert not server_of(engine).is_running


def test_servers_that_never_sleep_end_the_run(tmp_path):
    with fake_engine(tmp_path, max_failures=1, **SHARED) as engine:
        ask_fake(server_of(engine).url, fail_sleep=1)
        with pytest.raises(MachineError, match=r"1 failures of the server in a row .*sleep.* status 500"):
            engine.sleep()


@pytest.mark.parametrize("placement", ["shared", "split"])
def test_only_a_shared_server_is_started_with_sleep_mode(tmp_path, placement):
    config = make_config(vllm={"placement": placement}).vllm
    server = VLLMServer(config, dtype="float32", max_model_len=20, scratch=tmp_path, log=tmp_path / "log")
    assert ("--enable-sleep-mode" in server._arguments(tmp_path)) == (placement == "shared")


def test_weights_are_written_from_host_memory_as_from_a_device(tmp_path):
    weights = WeightsDirectory(tiny_architecture(), model_dir(tmp_path / "model"), "float32", tmp_path)
    ours, theirs = (
        (weights.write(params) / "model.safetensors").read_bytes()
        for params in (park(nnx.state(tiny_model(seed=4))), nnx.state(tiny_model(seed=4)))
    )
    assert ours == theirs
