"""The forecasts of `plan --compare`: the published totals, simulations against formulas, hours by hand."""

from pathlib import Path

import pytest
from click.testing import CliRunner
from helpers import make_config

from sgpo_jax.algorithms.compute import Ledger, MeanLengths, Stage, TokenCounts
from sgpo_jax.comparison import Workload, compare, hours, simulate, workload_of
from sgpo_jax.config import load_config
from sgpo_jax.launch import cli
from sgpo_jax.types import UserError

PAPER = Path(__file__).parent.parent / "configs" / "qwen2.5-math-7b-forecast.yaml"
LENGTHS = MeanLengths(profiling=50, training=100, prompt=10)


def exaflops(*overrides, scale=1):
    """(total, profiling, training) by method, paper ledger. scale: fewer queries for a model so many times as large."""
    config = load_config(PAPER, overrides)
    given = config.forecast.model_copy(update={"counts": tuple(count // scale for count in config.forecast.counts)})
    found = {}
    for method in compare(workload_of(given, config.forecast.num_params * scale), config):
        tree = method.forecast.ledger.to_dict()
        stages = [tree["stages"][stage]["paper"]["exaflops"] for stage in ("profiling", "training")]
        found[method.name] = (tree["total"]["paper"]["exaflops"], *stages)
    return found


def test_published_totals():
    """A consistency check: the histogram and the lengths were fitted to these totals."""
    found = exaflops()
    assert found["dapo"] == pytest.approx((22.3, 0, 22.3), rel=0.03)
    assert found["sgpo"] == pytest.approx((8.9, 1.6, 7.3), rel=0.03)
    assert found["sgpo"][0] < found["greso"][0] < found["dapo"][0]
    assert found["knapsack"] == pytest.approx(found["dapo"])
    assert exaflops("sgpo.unsolved_frac=0", scale=20)["sgpo"][2] == pytest.approx(5.9, rel=0.03)
    twice = exaflops("sgpo.later_epochs=reprofiled", scale=20)["sgpo"]
    assert twice == pytest.approx(
        (found["sgpo"][0] + found["sgpo"][1], 2 * found["sgpo"][1], found["sgpo"][2]), rel=0.01
    )


def make_workload(counts):
    return Workload(counts, 8, LENGTHS, 1000)


def settings(method, prompts_per_step=8, epochs=2, **sections):
    train = {"method": method, "prompts_per_step": prompts_per_step, "epochs": epochs}
    return make_config(train=train, refill={"when_short": "train", "max_rounds": 100}, **sections)


def training_of(forecast):
    return forecast.ledger.tokens[Stage.TRAINING]


def test_simulated_dapo_is_its_formula():
    workload = make_workload({0: 300, 1: 200, 4: 200, 7: 100, 8: 200})
    config = settings("dapo")
    simulated = simulate(workload, config)
    (formula,) = [m.forecast for m in compare(workload, config) if m.name == "dapo"]
    assert training_of(simulated).generated == training_of(formula).generated == 2 * 1000 * 8 * 100
    assert training_of(simulated).prompt_generated == training_of(formula).prompt_generated
    assert training_of(simulated).trained == pytest.approx(training_of(formula).trained, rel=0.05)
    assert simulated.num_steps == pytest.approx(formula.num_steps, rel=0.05)


def test_knapsack_spends_the_budget_and_trains_it_all():
    counts = training_of(simulate(make_workload({0: 30, 2: 30, 5: 23}), settings("knapsack")))
    assert counts.generated == counts.trained == 2 * 83 * 8 * 100


@pytest.mark.parametrize("k", [0, 8])
def test_greso_skips_half_of_the_hopeless_and_trivial_in_the_second_epoch(k):
    """A step is an epoch here: the rates are still 0.5."""
    count = 2000
    counts = training_of(simulate(make_workload({k: count}), settings("greso", prompts_per_step=count)))
    assert counts.generated / (count * 800) == pytest.approx(1.5, abs=0.05)
    assert counts.trained == 0


@pytest.mark.parametrize("size", [2, 4])
def test_just_in_time_profiles_every_query_and_reuses_the_informative(size):
    workload = make_workload({0: 300, 2: 400, 4: 300})
    forecast = simulate(workload, settings("just_in_time", just_in_time={"group_size": size}))
    profiling, counts = forecast.ledger.tokens[Stage.PROFILING], training_of(forecast)
    assert (profiling.generated, profiling.prompt_generated) == (2 * 1000 * 2 * 50, 2 * 1000 * 10)
    num_groups = counts.reused / (2 * 50)
    assert num_groups == pytest.approx(2 * (400 * 2 * 0.25 * 0.75 + 300 * 0.5), rel=0.1)
    assert counts.generated == num_groups * (size - 2) * 100
    assert counts.trained == counts.generated + counts.reused
    assert num_groups / 8 <= forecast.num_steps <= num_groups / 8 + 2


def test_hours_by_hand():
    ledger = Ledger(10).add(Stage.PROFILING, TokenCounts(generated=300, prompt_generated=100))
    ledger = ledger.add(Stage.TRAINING, TokenCounts(generated=500, trained=200, rematerialised=50))
    ledger = ledger.add(Stage.EVALUATION, TokenCounts(generated=10**9))
    sampling, other = 2 * 10 * 900, 6 * 10 * 200 + 2 * 10 * 50
    expected = (sampling / (100 * 0.05) + other / (100 * 0.4)) / 3600
    shares = {"mfu_train": 0.4, "mfu_generate": 0.05}
    found = hours(ledger, make_config(hardware={"flops_per_s": 100.0, **shares}))
    assert found.total == pytest.approx(expected)
    assert found.profiling / found.rollouts == pytest.approx(400 / 500)
    assert hours(ledger, make_config()) is None

    # A quarter of two hosts' eight H100s trains, the others sample; idle ones are not at work for anybody else.
    placed = {"rollouts": {"engine": "vllm"}, "mesh": {"devices": [0, 1]}}
    machines = {"device": "h100-80gb", "num_hosts": 2, "devices_per_host": 8, **shares}
    split = hours(ledger, make_config(hardware=machines, **placed))
    assert split.updates * 3600 == pytest.approx(other / (4 * 989.4e12 * 0.4))
    assert (split.profiling + split.rollouts) * 3600 == pytest.approx(sampling / (12 * 989.4e12 * 0.05))


def test_command_needs_neither_model_nor_profile_where_a_histogram_is_given(tmp_path):
    result = CliRunner().invoke(cli, ["plan", "--compare", str(PAPER), f"run_dir={tmp_path / 'run'}"])
    assert result.exit_code == 0, result.output
    lines = {line.split()[0]: line.split() for line in result.output.splitlines() if line.strip()}
    assert lines["dapo"][-5:] != lines["sgpo"][-5:]
    assert "22.3 E" in " ".join(lines["dapo"])
    assert "greso: its scheduler run on outcomes drawn at the profiled success rates." in result.output
    assert not (tmp_path / "run").exists()


def test_a_histogram_of_another_number_of_samples_is_refused():
    with pytest.raises(UserError, match=r"forecast\.counts has 9 numbers; with profile\.num_samples=4 it needs one"):
        load_config(PAPER, ["profile.num_samples=4"])


def test_posterior_epochs_are_forecast_from_the_profile_alone():
    """Every query once in the second epoch, with the size of its mean rate: 8 for 0 of 8, 4 for 4 of 8 and 8 of 8."""
    knobs = {"later_epochs": "posterior", "later_group_sizes": [4, 8], "unsolved_from_epoch": 2}
    methods = compare(make_workload({0: 30, 4: 20, 8: 10}), settings("sgpo", sgpo=knobs))
    (sgpo,) = [m.forecast for m in methods if m.name == "sgpo"]
    assert training_of(sgpo).generated == (20 * 2 + 30 * 8 + 30 * 4) * 100
    assert sgpo.num_steps == 3 + 4 + 4
