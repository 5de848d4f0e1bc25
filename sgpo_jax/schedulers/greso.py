"""GRESO (arXiv 2506.02177): dynamic sampling that skips queries whose last groups taught nothing, before rollout."""

from collections.abc import Mapping
from dataclasses import astuple
from typing import Any

import numpy as np

from sgpo_jax.algorithms.greso import ExplorationRates, Outcome, next_round_size, skip_probability, updated_rates
from sgpo_jax.config import RefillConfig
from sgpo_jax.schedulers.order import Portion
from sgpo_jax.schedulers.uniform import RefillStep, UniformScheduler
from sgpo_jax.types import Query, RolloutGroup

_SKIP_STREAM = 2506  # apart from the seeds of other random choices


class GRESOScheduler(UniformScheduler):
    """As `UniformScheduler`, but for which queries are rolled out, and how many a round.

    A skipped query counts as visited. The first round of a step asks for the most that a round may ask for.
    *Reading*: the rates move from the second epoch on, since in the first nothing can be skipped; a group without a
    verdict leaves no trace.
    """

    def __init__(
        self,
        queries: Mapping[str, Query],
        *,
        group_size: int,
        epochs: int,
        prompts_per_step: int,
        refill: RefillConfig,
        seed: int,
    ) -> None:
        super().__init__(
            queries, group_size=group_size, epochs=epochs, prompts_per_step=prompts_per_step, refill=refill, seed=seed
        )
        self._seed = seed
        self._rates = ExplorationRates()
        self._traces: dict[str, list[Outcome]] = {}

    def state_dict(self) -> dict[str, Any]:
        traces = {query_id: [str(outcome) for outcome in trace] for query_id, trace in self._traces.items()}
        return {**super().state_dict(), "rates": list(astuple(self._rates)), "traces": traces}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._rates = ExplorationRates(*state["rates"])
        self._traces = {query_id: [Outcome(name) for name in trace] for query_id, trace in state["traces"].items()}

    def _round_size(self, num_missing: int) -> int:
        outcomes = self._step.round_outcomes
        num_groups = outcomes.total()
        return next_round_size(num_missing, num_groups, num_groups - outcomes[Outcome.MIXED], self._prompts_per_step)

    def _rolls_out(self, drawn: Portion[str]) -> bool:
        """A draw that depends on the seed and the place in the order only, so that it needs no state."""
        skip = skip_probability(self._traces.get(drawn.items[0], ()), self._rates)
        return np.random.default_rng((self._seed, _SKIP_STREAM, drawn.index)).random() >= skip

    def _observe(self, group: RolloutGroup, outcome: Outcome) -> None:
        self._traces.setdefault(group.query.query_id, []).append(outcome)

    def _end_step(self, step: RefillStep) -> None:
        if step.last is not None and step.last.stretch > 0:
            all_correct, all_wrong = step.outcomes[Outcome.ALL_CORRECT], step.outcomes[Outcome.ALL_WRONG]
            self._rates = updated_rates(self._rates, step.outcomes.total(), all_correct, all_wrong)
