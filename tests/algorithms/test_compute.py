import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgpo_jax.algorithms.allocation import ProfileRow, plan_phases
from sgpo_jax.algorithms.compute import (
    Ledger,
    MeanLengths,
    PhaseSize,
    Stage,
    TokenCounts,
    forecast,
    itemised_flops,
    paper_flops,
    phases_of_histogram,
    sizes_of,
    uniform_phases,
)
from sgpo_jax.config import SGPOConfig

COUNTS = TokenCounts(
    generated=1000,
    trained=600,
    reused=70,
    prompt_generated=100,
    prompt_trained=200,
    old_logprobs=800,
    ref_logprobs=50,
    rematerialised=30,
)


def test_paper_ledger_by_hand():
    assert paper_flops(Stage.PROFILING, COUNTS, num_params=10) == 2 * 10 * 1000
    assert paper_flops(Stage.TRAINING, COUNTS, num_params=10) == 12 * 10 * 1000 + 10 * 10 * 70


def test_itemised_ledger_by_hand():
    # rollout 2P (1000 + 100), old 2P 800, reference 2P 50, update 6P (600 + 200), rematerialisation 2P 30
    assert itemised_flops(COUNTS, num_params=10) == 22_000 + 16_000 + 1_000 + 48_000 + 600


@pytest.mark.parametrize(
    ("name", "charge"),
    [
        ("generated", 2),
        ("trained", 6),
        ("reused", 0),
        ("prompt_generated", 2),
        ("prompt_trained", 6),
        ("old_logprobs", 2),
        ("ref_logprobs", 2),
        ("rematerialised", 2),
    ],
)
def test_what_each_token_costs(name, charge):
    assert itemised_flops(TokenCounts(**{name: 7}), num_params=3) == charge * 3 * 7


def test_a_reused_token_costs_as_much_as_any_other():
    """100 tokens profiled, 40 of them trained with 30 fresh ones; against 130 rolled out, of which 70 are trained."""
    profiled = Ledger(10).add(Stage.PROFILING, TokenCounts(generated=100))
    reuse = profiled.add(Stage.TRAINING, TokenCounts(generated=30, trained=70, reused=40))
    assert reuse.paper_flops == 10 * (2 * 60 + 12 * 70)
    plain = Ledger(10).add(Stage.TRAINING, TokenCounts(generated=130, trained=70))
    assert reuse.itemised_flops == plain.itemised_flops == 10 * (2 * 130 + 6 * 70)


def test_repeated_updates_are_wasted_even_where_nothing_was_generated():
    start = Ledger(10)
    update = TokenCounts(trained=9, reused=9)
    assert start.resumed(start.add(Stage.TRAINING, update)).tokens[Stage.WASTED] == update


def test_evaluation_and_waste_are_charged_nowhere():
    ledger = Ledger(10).add(Stage.PROFILING, COUNTS).add(Stage.TRAINING, COUNTS)
    charged = ledger.paper_flops, ledger.itemised_flops
    assert charged == (14 * 10 * 1000 + 10 * 10 * 70, 2 * 87_600)
    apart = ledger.add(Stage.EVALUATION, COUNTS).add(Stage.WASTED, COUNTS)
    assert (apart.paper_flops, apart.itemised_flops) == charged
    assert apart.tokens[Stage.EVALUATION] == apart.tokens[Stage.WASTED] == COUNTS


def test_adding_makes_a_new_ledger():
    empty = Ledger(10)
    twice = empty.add(Stage.TRAINING, COUNTS).add(Stage.TRAINING, COUNTS)
    assert empty == Ledger(10)
    assert twice.tokens[Stage.TRAINING].trained == 1200
    assert twice.tokens[Stage.PROFILING] == TokenCounts()


TOKENS = st.builds(TokenCounts, **{field.name: st.integers(0, 10**13) for field in dataclasses.fields(TokenCounts)})


@given(added=st.lists(st.tuples(st.sampled_from(Stage), TOKENS)))
def test_ledger_survives_json(added):
    ledger = Ledger(7_600_000_000)
    for stage, counts in added:
        ledger = ledger.add(stage, counts)
    tree = json.loads(json.dumps(ledger.to_dict(), allow_nan=False))
    assert Ledger.from_dict(tree) == ledger
    assert tree["total"]["paper"]["flops"] == ledger.paper_flops
    assert tree["total"]["itemised"]["exaflops"] == pytest.approx(ledger.itemised_flops / 1e18)
    assert sum(tree["stages"][stage]["paper"]["flops"] for stage in ("profiling", "training")) == ledger.paper_flops


def test_repeated_work_is_wasted_once():
    start = Ledger(10).add(Stage.PROFILING, COUNTS)
    one = TokenCounts(generated=1, trained=1)
    first_kill = start.add(Stage.TRAINING, one).add(Stage.EVALUATION, one)
    resumed = start.resumed(first_kill)
    assert resumed.tokens == start.tokens | {Stage.WASTED: one}, "evaluations are counted by their own files"
    second_kill = resumed.add(Stage.TRAINING, one)  # again before a checkpoint
    assert start.resumed(second_kill).tokens[Stage.WASTED] == one + one
    assert start.resumed(start) == start
    assert first_kill.resumed(start).tokens[Stage.WASTED] == TokenCounts(), "an older file says nothing"


# The paper's 7B run on DAPO-Math-17k: num_correct of 8 -> queries, the rest of 14,116 trivial.
HISTOGRAM = {0: 5060, 1: 2083, 2: 1476, 3: 1193, 4: 1025, 5: 913, 6: 834}
HISTOGRAM[8] = 14_116 - sum(HISTOGRAM.values())
LENGTHS = MeanLengths(profiling=932, training=1083, prompt=0)


def published(phases, **profiling):
    """ExaFLOPs of the paper ledger: (total, profiling, training)."""
    result = forecast(
        phases, LENGTHS, num_params=7_600_000_000, prompts_of_step=lambda size: 64, rematerialise=False, **profiling
    )
    tree = result.ledger.to_dict()
    stages = [tree["stages"][stage]["paper"]["exaflops"] for stage in ("profiling", "training")]
    return tree["total"]["paper"]["exaflops"], *stages


def test_published_dapo():
    total, _, _ = published(uniform_phases(HISTOGRAM, 8, group_size=8, epochs=2))
    assert total == pytest.approx(22.3, rel=0.03)


def test_published_sgpo():
    phases = phases_of_histogram(HISTOGRAM, 8, SGPOConfig(), epochs=2)
    total, profiling, training = published(phases, num_profiled=14_116, num_profile_completions=14_116 * 8)
    assert total == pytest.approx(8.9, rel=0.03)
    assert profiling == pytest.approx(1.6, rel=0.03)
    assert training == pytest.approx(7.3, rel=0.03)


def test_published_sgpo_without_unsolved_queries():
    phases = phases_of_histogram(HISTOGRAM, 8, SGPOConfig(unsolved_frac=0.0), epochs=2)
    assert published(phases)[2] == pytest.approx(5.9, rel=0.03)
    num_rollouts = sum(phase.group_size * phase.num_queries for phase in phases)
    assert num_rollouts / sum(phase.num_queries for phase in phases) == pytest.approx(4.1, abs=0.06)


@pytest.mark.parametrize(
    "config",
    [SGPOConfig(), SGPOConfig(rounding="ceil", group_sizes=(2, 3, 16)), SGPOConfig(unsolved_from_epoch=2)],
)
@pytest.mark.parametrize("counts", [{0: 25, 1: 7, 2: 5, 3: 6, 4: 3, 7: 9}, {0: 25, 2: 5}, {1: 3, 8: 2}])
def test_histogram_and_plan_have_the_same_phases(config, counts):
    rows = [ProfileRow(f"{k}-{i}", 8, k, 0, 0, 0) for k, count in counts.items() for i in range(count)]
    plan = plan_phases(rows, config, epochs=2, seed=0)
    assert sizes_of(plan.phases) == phases_of_histogram(counts, 8, config, epochs=2)


def test_informative_groups_of_uniform_sampling():
    (phase,) = uniform_phases({0: 100, 4: 10, 8: 100}, 8, group_size=4, epochs=1)
    assert phase.num_queries == 210
    assert phase.num_trained == pytest.approx(10 * (1 - 2 / 16))


def test_forecast_by_hand():
    phases = [PhaseSize(group_size=2, num_queries=10, num_trained=10), PhaseSize(8, 6, num_trained=2.5)]
    lengths = MeanLengths(profiling=50, training=100, prompt=30)
    arguments = {
        "num_params": 1000,
        "prompts_of_step": lambda size: 4,
        "num_profiled": 20,
        "num_profile_completions": 160,
    }
    result = forecast(phases, lengths, rematerialise=True, **arguments)
    assert result.num_steps == 3 + 1
    assert result.ledger.tokens[Stage.PROFILING] == TokenCounts(generated=8000, prompt_generated=600)
    assert result.ledger.tokens[Stage.TRAINING] == TokenCounts(
        generated=2000 + 4800,
        trained=2000 + 2000,
        prompt_generated=300 + 180,
        prompt_trained=600 + 600,
        rematerialised=4000 + 1200,
    )
    half = [PhaseSize(2, num_queries=0, num_trained=5, num_reused=10), PhaseSize(4, 0, 5, 10), PhaseSize(2, 5, 0)]
    reused = forecast(half, lengths, rematerialise=False, num_params=1000, prompts_of_step=lambda size: 4).ledger
    assert reused.tokens[Stage.TRAINING] == TokenCounts(
        generated=1000, trained=20 * 50 + 10 * 100, reused=20 * 50, prompt_generated=150, prompt_trained=30 * 30
    )
    without = forecast(phases, lengths, rematerialise=False, **arguments)
    assert result.ledger.itemised_flops - without.ledger.itemised_flops == 2 * 1000 * 5200
    assert result.ledger.paper_flops == without.ledger.paper_flops == 1000 * (2 * 8000 + 12 * 6800)
