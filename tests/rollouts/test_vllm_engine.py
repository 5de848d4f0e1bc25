"""The vLLM engine over a fake server: sampling, faults, weights. What only a real server can show is in tests/vllm."""

import dataclasses
import os
import subprocess
import time
from contextlib import nullcontext

import numpy as np
import pytest
from flax import nnx
from helpers import make_query, tiny_model
from vllm_helpers import (
    FAKE,
    STOP,
    ask_fake,
    bigram_logprobs,
    bigram_probe,
    fake_engine,
    model_dir,
    server_of,
)

from sgpo_jax.rollouts.vllm_server import _free_port
from sgpo_jax.rollouts.vllm_weights import WeightsDirectory
from sgpo_jax.types import FinishReason, GroupRequest, MachineError, Purpose, SamplingParams, UserError

SAMPLING = SamplingParams(max_completion_tokens=12)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """One server for the tests that leave it as it was."""
    with fake_engine(tmp_path_factory.mktemp("vllm"), max_attempts=3) as engine:
        yield engine


@pytest.fixture
def url(engine):
    return server_of(engine).url


def requests_for(count, num_samples=3, purpose=Purpose.TRAIN, **fields):
    rng = np.random.default_rng(1)
    queries = [make_query(f"q{i}", tuple(rng.integers(1, 16, 1 + i % 8).tolist())) for i in range(count)]
    return [GroupRequest(query, num_samples, purpose, **fields) for query in queries]


def completions_of(engine, requests, sampling=SAMPLING):
    return {
        (group.request.query.query_id, completion.sample_index): completion
        for group in engine.generate(requests, sampling)
        for completion in group.completions
    }


def ids_of(completions):
    return {key: completion.token_ids_C.tolist() for key, completion in completions.items()}


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_gives_every_group_with_the_servers_tokens_and_logprobs(engine, temperature):
    requests = requests_for(20)
    prompts = {request.query.query_id: request.query.prompt_ids for request in requests}
    groups = list(engine.generate(requests, SamplingParams(12, temperature)))
    assert sorted(g.request.query.query_id for g in groups) == sorted(prompts)
    reasons = set()
    for group in groups:
        assert [c.sample_index for c in group.completions] == [0, 1, 2]
        for completion in group.completions:
            previous = prompts[group.request.query.query_id][-1]
            for token, logprob in zip(completion.token_ids_C, completion.sampler_logprobs_C, strict=True):
                assert logprob == pytest.approx(bigram_logprobs(tiny_model(), previous, temperature)[token], abs=1e-4)
                previous = token
            stopped = completion.token_ids_C[-1] == STOP
            assert completion.finish_reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)
            assert stopped or len(completion.token_ids_C) == 12
            reasons.add(completion.finish_reason)
    assert reasons == set(FinishReason)


def test_a_completion_depends_on_its_seed_alone(engine):
    together = ids_of(completions_of(engine, requests_for(12)))
    shuffled = ids_of(completions_of(engine, requests_for(12)[::-1]))
    assert together == shuffled
    first = completions_of(engine, requests_for(12, 1))
    rest = completions_of(engine, requests_for(12, 2, first_sample=1))
    assert ids_of(first | rest) == together, "filling up a group gives its missing samples"


@pytest.mark.parametrize("change", [{"purpose": Purpose.PROFILE}, {"visit": 1}])
def test_purpose_and_visit_change_the_noise(engine, change):
    assert ids_of(completions_of(engine, requests_for(4))) != ids_of(completions_of(engine, requests_for(4, **change)))


def test_seeds_of_samples_never_meet_and_fit_into_63_bits(engine, url):
    before = len(ask_fake(url)["requests"])
    list(engine.generate(requests_for(200, 8), SAMPLING))
    seeds = {body["seed"] + i for body in ask_fake(url)["requests"][before:] for i in range(body["n"])}
    assert len(seeds) == 200 * 8
    assert min(seeds) >= 0
    assert 2**60 < max(seeds) < 2**63


def test_sampling_that_would_bias_the_ratio_is_switched_off(engine, url):
    list(engine.generate(requests_for(1), SamplingParams(12, temperature=0.7)))
    body = ask_fake(url)["requests"][-1]
    sent = {"temperature": 0.7, "top_p": 1.0, "top_k": -1, "max_tokens": 12, "ignore_eos": True, "stop_token_ids": [0]}
    assert body.items() >= {**sent, "logprobs": 0, "return_token_ids": True}.items()


def test_greedy_samples_are_drawn_once(engine, url):
    completions = completions_of(engine, requests_for(1, 3), SamplingParams(12, temperature=0.0))
    assert ask_fake(url)["requests"][-1]["n"] == 1, "vLLM refuses more"
    assert list(completions) == [("q0", 0), ("q0", 1), ("q0", 2)]
    assert len({tuple(c.token_ids_C) for c in completions.values()}) == 1


@pytest.mark.parametrize("length", [0, 9])
def test_prompts_that_do_not_fit_are_refused_before_anything_is_sent(engine, url, length):
    before = len(ask_fake(url)["requests"])
    requests = [*requests_for(2), GroupRequest(make_query("long", (1,) * length), 1, Purpose.TRAIN)]
    with pytest.raises(UserError, match=rf"query long: a prompt of {length} tokens; allowed are 1 to 8"):
        list(engine.generate(requests, SAMPLING))
    assert len(ask_fake(url)["requests"]) == before


@pytest.mark.parametrize("fault", ["fail_completion", "cut_completion", "drop_sample"])
def test_a_failed_or_incomplete_answer_is_asked_for_again(engine, url, fault):
    whole = ids_of(completions_of(engine, requests_for(6)))
    ask_fake(url, **{fault: 2})
    found = completions_of(engine, requests_for(6))
    assert ids_of(found) == whole
    assert all(completion.error is None for completion in found.values())
    assert server_of(engine).is_running


@pytest.mark.parametrize(("fault", "attempts"), [("refuse_completion", 1), ("fail_completion", 3)])
def test_a_request_that_fails_for_good_leaves_the_others_their_results(engine, url, fault, attempts):
    before = len(ask_fake(url)["requests"])
    ask_fake(url, **{fault: attempts})
    [alone] = engine.generate(requests_for(1), SAMPLING)
    assert len(ask_fake(url)["requests"]) - before == attempts
    assert [c.sample_index for c in alone.completions] == [0, 1, 2]
    assert all("status" in c.error and len(c.token_ids_C) == 0 for c in alone.completions)
    ask_fake(url, refuse_completion=1)
    errors = [c.error for c in completions_of(engine, requests_for(6)).values()]
    assert sum(error is not None for error in errors) == 3, "one group of three"


def test_leaving_early_stops_asking(tmp_path):
    with fake_engine(tmp_path, max_in_flight=6) as engine:
        groups = engine.generate(requests_for(100), SAMPLING)
        next(groups)
        groups.close()
        time.sleep(0.3)
        count = len(ask_fake(server_of(engine).url)["requests"])
        assert count < 50
        time.sleep(0.3)
        assert len(ask_fake(server_of(engine).url)["requests"]) == count


def test_a_server_that_dies_is_started_again_and_nothing_is_lost(tmp_path):
    with fake_engine(tmp_path) as engine:
        whole = ids_of(completions_of(engine, requests_for(30)))
        ask_fake(server_of(engine).url, die_completion=1)
        found = completions_of(engine, requests_for(30))
        assert ids_of(found) == whole
        assert (tmp_path / "vllm.log").read_text().count("fake vLLM") == 2


def test_a_server_that_hangs_is_started_again(tmp_path):
    with fake_engine(tmp_path, request_time_limit_s=1.5) as engine:
        whole = ids_of(completions_of(engine, requests_for(3)))
        ask_fake(server_of(engine).url, hang_completion=3)
        assert ids_of(completions_of(engine, requests_for(3))) == whole
        assert (tmp_path / "vllm.log").read_text().count("fake vLLM") == 2


def test_a_server_that_keeps_dying_ends_the_run(tmp_path):
    with fake_engine(tmp_path, max_failures=2, env={"FAKE_VERSION": "0.32.1"}) as engine:
        server = server_of(engine)
        start = server.start
        server.start = lambda directory: (start(directory), server._process.kill())  # the next start is in vain
        ask_fake(server.url, die_completion=1)
        with pytest.raises(MachineError, match=r"2 failures of the server in a row \(vllm.max_failures\), the last: "):
            list(engine.generate(requests_for(3), SAMPLING))


def update(engine, seed, version):
    model = tiny_model(seed=seed)
    return engine.update_weights(nnx.state(model), version, bigram_probe(model))


def test_new_weights_are_used_stamped_and_logged(tmp_path):
    with fake_engine(tmp_path) as engine:
        completions_of(engine, requests_for(5))
        figures = update(engine, seed=9, version=5)
        assert figures["sync/probe_gap"] < 1e-5
        assert figures["sync/num_failures"] == 0
        after = completions_of(engine, requests_for(5))
        assert {c.policy_version for c in after.values()} == {5}
        calls = ask_fake(server_of(engine).url)["calls"]
        order = ["/pause", "/collective_rpc", "/reset_prefix_cache", "/resume"]
        assert [call for call in calls if call != "/v1/completions"] == order
        prompt = requests_for(5)[2].query.prompt_ids
        first = after["q2", 0]
        expected = bigram_logprobs(tiny_model(seed=9), prompt[-1])[first.token_ids_C[0]]
        assert first.sampler_logprobs_C[0] == pytest.approx(expected, abs=1e-4)
        assert len(list(engine._weights.path.glob("weights-*"))) == 1, "old weights are removed"


@pytest.mark.parametrize("fault", ["fail_reload", "forget_reload", "fail_reset"])
def test_a_failed_sync_starts_the_server_again_with_the_right_weights(tmp_path, fault):
    with fake_engine(tmp_path) as engine:
        ask_fake(server_of(engine).url, **{fault: 1})
        figures = update(engine, seed=9, version=1)
        assert figures["sync/num_failures"] == 1
        assert figures["sync/probe_gap"] < 1e-5
        assert (tmp_path / "vllm.log").read_text().count("fake vLLM") == 2
        assert {c.policy_version for c in completions_of(engine, requests_for(3)).values()} == {1}


def test_syncs_that_fail_in_a_row_end_the_run(tmp_path):
    with fake_engine(tmp_path, max_failures=2) as engine:
        ask_fake(server_of(engine).url, forget_reload=1)
        update(engine, seed=1, version=1)
        list(engine.generate(requests_for(2), SAMPLING))
        ask_fake(server_of(engine).url, forget_reload=1)
        with pytest.raises(
            MachineError, match=r"2 failures of a sync in a row .* off by up to \d\.\d+e[+-]\d+, .*allowed are 1e"
        ):
            update(engine, seed=2, version=2)


def test_a_wrong_probe_is_an_error_at_the_start(tmp_path):
    other = bigram_probe(tiny_model(seed=5))
    with fake_engine(tmp_path) as engine:
        nan = dataclasses.replace(other, logprobs=tuple(logprobs * np.nan for logprobs in other.logprobs))
        for probe in (other, nan):
            engine._target = dataclasses.replace(engine._target, probe=probe)
            with pytest.raises(MachineError, match="log-probs of the probe are off by"):
                engine._run(engine._compare(engine._replicas[0]))


def test_many_small_differences_are_an_error_too(tmp_path):
    with fake_engine(tmp_path, probe_max_gap=1.0, probe_mean_gap=0.01) as engine:
        right = engine._target.probe
        for gap, is_right in ((0.005, True), (0.02, False)):
            probe = dataclasses.replace(right, logprobs=tuple(logprobs + gap for logprobs in right.logprobs))
            engine._target = dataclasses.replace(engine._target, probe=probe)
            with nullcontext() if is_right else pytest.raises(MachineError, match=r"2\.00e-02 in the mean"):
                engine._run(engine._compare(engine._replicas[0]))


@pytest.fixture
def running(tmp_path):
    """Addresses of two servers that are not the engine's, with old weights."""
    arch = tiny_model().arch
    weights = WeightsDirectory(arch, model_dir(tmp_path / "old"), "float32", tmp_path)
    old = weights.write(nnx.state(tiny_model(seed=8)))
    ports = [_free_port(), _free_port()]
    options = ["--model", str(old), "--host", "127.0.0.1", "--max-model-len", "64"]
    servers = [
        subprocess.Popen([*FAKE, *options, "--port", str(port)], env={**os.environ, "VLLM_API_KEY": "theirs"})
        for port in ports
    ]
    yield [f"http://127.0.0.1:{port}" for port in ports]
    for server in servers:
        server.kill()
        server.wait()


def test_servers_that_run_already_get_the_weights_and_share_the_work(tmp_path, running, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "theirs")
    with fake_engine(tmp_path, urls=running) as engine:
        found = completions_of(engine, requests_for(40))
    with fake_engine(tmp_path / "own") as engine:
        assert ids_of(found) == ids_of(completions_of(engine, requests_for(40)))
    counts = [len(ask_fake(url)["requests"]) for url in running]
    assert sum(counts) == 40
    assert min(counts) > 10


def test_a_wrong_key_is_an_error(tmp_path, running, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "other")
    with pytest.raises(MachineError, match="status 401"):
        fake_engine(tmp_path, urls=running).__enter__()


def test_servers_that_run_already_must_take_the_longest_request(tmp_path, running, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "theirs")
    with pytest.raises(
        UserError, match="serves up to 64 tokens; this run needs 108: start it with --max-model-len 108"
    ):
        fake_engine(tmp_path, urls=running, longest_prompt=96).__enter__()


def test_a_model_too_short_for_the_requests_is_an_error_before_any_start(tmp_path):
    with pytest.raises(
        UserError, match="made for 128 tokens, but the longest prompt has 117 and a completion up to 12"
    ):
        fake_engine(tmp_path, longest_prompt=117).__enter__()


def test_commands_that_cannot_be_used_are_named(tmp_path):
    with pytest.raises(UserError, match=r"vllm.command: no/such/python is no program; make it with `bash tools/setup"):
        fake_engine(tmp_path, command=["no/such/python", "-m", "vllm"]).__enter__()
