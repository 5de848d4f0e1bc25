"""sGPO whose later epochs go by the profile and all of training so far, see algorithms/posterior.py."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from sgpo_jax.algorithms.allocation import Phase, ProfileRow, profile_row
from sgpo_jax.algorithms.posterior import posterior_phases
from sgpo_jax.config import Config
from sgpo_jax.schedulers.base import Decision
from sgpo_jax.schedulers.epochs import EpochByEpoch
from sgpo_jax.types import GroupRequest, Query, RolloutGroup


class PosteriorScheduler:
    """As `SGPOScheduler`, but each epoch after the first is planned when the one before is over, by the outcomes until
    then. Training ends early where that leaves nothing to train on.
    """

    def __init__(
        self, first_epoch: Sequence[Phase], rows: Sequence[ProfileRow], queries: Mapping[str, Query], config: Config
    ) -> None:
        """rows: the profile, of all queries."""
        self._config = config
        self._steps = EpochByEpoch(first_epoch, queries, config)
        self._rows = {row.query_id: row for row in rows}
        self._known: list[list[ProfileRow]] = []  # at the start of each later epoch

    @property
    def num_steps(self) -> None:
        """It depends on outcomes that are still to come."""
        return None

    def propose(self) -> list[GroupRequest]:
        return self._steps.propose()

    def accept(self, groups: Sequence[RolloutGroup]) -> Decision:
        for group in groups:
            row = profile_row(group)
            self._rows[row.query_id] += row
        decision = self._steps.accept(groups)
        if not decision.done or self._steps.epoch == self._config.train.epochs:
            return decision
        rows = list(self._rows.values())
        if not self._phases(rows):
            return replace(decision, progress=1.0)
        self._begin_epoch(rows)
        return replace(decision, done=False)

    def state_dict(self) -> dict[str, Any]:
        known = [[asdict(row) for row in rows] for rows in self._known]
        return {"steps": self._steps.state_dict(), "rows": list(map(asdict, self._rows.values())), "known": known}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Into a scheduler that has not begun."""
        for rows in state["known"]:
            self._begin_epoch([ProfileRow(**row) for row in rows])
        self._rows = {row["query_id"]: ProfileRow(**row) for row in state["rows"]}
        self._steps.load_state_dict(state["steps"])

    def _begin_epoch(self, rows: list[ProfileRow]) -> None:
        phases = self._phases(rows)
        self._known.append(rows)
        self._steps.add(phases)

    def _phases(self, rows: Sequence[ProfileRow]) -> tuple[Phase, ...]:
        return posterior_phases(rows, self._config.sgpo, self._steps.epoch + 1, self._config.seed)
