"""sGPO's curriculum where each epoch is planned only when the one before is over."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from sgpo_jax.algorithms.allocation import Phase, prompts_of_step
from sgpo_jax.config import Config
from sgpo_jax.schedulers.base import Decision
from sgpo_jax.schedulers.sgpo import SGPOScheduler
from sgpo_jax.types import GroupRequest, Query, RolloutGroup


class EpochByEpoch:
    """An `SGPOScheduler` of the epochs planned so far, to which more are added."""

    def __init__(self, first_epoch: Sequence[Phase], queries: Mapping[str, Query], config: Config) -> None:
        self._queries = queries
        self._config = config
        self._phases: tuple[Phase, ...] = ()
        self._epoch_ends = [0]  # steps up to the end of each epoch so far, that of none first
        self._add(tuple(first_epoch))

    @property
    def epoch(self) -> int:
        """The newest that is planned, from 1."""
        return len(self._epoch_ends) - 1

    def propose(self) -> list[GroupRequest]:
        return self._steps.propose()

    def accept(self, groups: Sequence[RolloutGroup]) -> Decision:
        """done: with the newest epoch. progress: in all of train.epochs, each the same share, whatever its steps."""
        decision = self._steps.accept(groups)
        start, end = self._epoch_ends[-2:]
        share = (round(decision.progress * self._steps.num_steps) - start) / (end - start)
        return replace(decision, progress=(self.epoch - 1 + share) / self._config.train.epochs)

    def add(self, phases: Sequence[Phase]) -> None:
        """The next epoch, behind those before it; it may have no phase."""
        position = self._steps.state_dict()
        self._add(tuple(phases))
        self._steps.load_state_dict(position)

    def state_dict(self) -> dict[str, Any]:
        """Where it stands; not the epochs that were added."""
        return self._steps.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Once the epochs of that time have been added again."""
        self._steps.load_state_dict(state)

    def _add(self, phases: tuple[Phase, ...]) -> None:
        self._phases += phases
        self._steps = SGPOScheduler(
            self._phases,
            self._queries,
            prompts_of_step=partial(prompts_of_step, self._config.train),
            seed=self._config.seed,
            curriculum=self._config.sgpo.curriculum,
        )
        self._epoch_ends.append(self._steps.num_steps)
