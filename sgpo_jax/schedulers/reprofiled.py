"""sGPO with a new profile before each later epoch: the paper found it worse than the stale one (arXiv 2606.08854)."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from sgpo_jax.algorithms.allocation import Phase, ProfileRow, plan_phases, profile_row
from sgpo_jax.config import Config
from sgpo_jax.schedulers.base import Decision
from sgpo_jax.schedulers.epochs import EpochByEpoch
from sgpo_jax.types import GroupRequest, Purpose, Query, RolloutGroup


class ReprofiledScheduler:
    """As `SGPOScheduler`, but each epoch after the first goes by a new profile of all queries by the current policy.

    The profile is asked for with Purpose.PROFILE, never trained, and taken between two steps. Where it finds nothing
    learnable any more, training ends with a step without an update.
    """

    def __init__(self, first_epoch: Sequence[Phase], queries: Mapping[str, Query], config: Config) -> None:
        self._queries = queries
        self._config = config
        self._steps = EpochByEpoch(first_epoch, queries, config)
        self._profiles: list[tuple[ProfileRow, ...]] = []  # one for each later epoch so far
        self._is_profiling = False

    @property
    def num_steps(self) -> None:
        """It depends on profiles that are still to come."""
        return None

    def propose(self) -> list[GroupRequest]:
        if not self._is_profiling:
            return self._steps.propose()
        visit = len(self._profiles) + 1  # the run's own profile was the first
        num_samples = self._config.profile.num_samples
        return [GroupRequest(query, num_samples, Purpose.PROFILE, visit=visit) for query in self._queries.values()]

    def accept(self, groups: Sequence[RolloutGroup]) -> Decision:
        if self._is_profiling:
            return self._accept_profile(groups)
        decision = self._steps.accept(groups)
        self._is_profiling = decision.done and self._steps.epoch < self._config.train.epochs
        return replace(decision, done=decision.done and not self._is_profiling)

    def state_dict(self) -> dict[str, Any]:
        profiles = [[asdict(row) for row in rows] for rows in self._profiles]
        return {"steps": self._steps.state_dict(), "profiles": profiles, "is_profiling": self._is_profiling}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Into a scheduler that has not begun."""
        for rows in state["profiles"]:
            self._plan_next_epoch(tuple(ProfileRow(**row) for row in rows))
        self._steps.load_state_dict(state["steps"])
        self._is_profiling = state["is_profiling"]

    def _accept_profile(self, groups: Sequence[RolloutGroup]) -> Decision:
        self._is_profiling = False
        has_phases = self._plan_next_epoch(tuple(sorted(map(profile_row, groups), key=lambda row: row.query_id)))
        return Decision(
            train=(),
            ready=not has_phases,
            phase=f"e{self._steps.epoch}",
            ends_phase=False,
            done=not has_phases,
            progress=1.0 if not has_phases else (self._steps.epoch - 1) / self._config.train.epochs,
        )

    def _plan_next_epoch(self, rows: tuple[ProfileRow, ...]) -> bool:
        """Whether it has any phase."""
        self._profiles.append(rows)
        epoch = self._steps.epoch + 1
        plan = plan_phases(rows, self._config.sgpo, epoch, self._config.seed)
        phases = tuple(phase for phase in plan.phases if phase.epoch == epoch)
        self._steps.add(phases)
        return bool(phases)
