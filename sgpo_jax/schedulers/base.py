"""What the training loop sees of a method."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from sgpo_jax.types import GroupRequest, Purpose, Rollout, RolloutGroup


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do with the groups that came back.

    train: the groups of this step, when `ready`. A group that lacks rollouts is never among them. Empty where nothing
        of what was rolled out can be trained on: the step is then one without an update. A group may have been asked
        for as a profile; rollouts beyond its request's number were then added to it, asked for to be trained.
    ready: make a step now; else propose again.
    phase: the name of the phase that `train` belongs to; ends_phase: it was that phase's last step.
    done: the schedule ends with this step; only where `ready`.
    progress: share of the schedule that is over after this step, in (0, 1]; what a learning rate may depend on.
    dropped: queries and groups of this step that are not trained, counted by reason.
    """

    train: tuple[RolloutGroup, ...]
    ready: bool
    phase: str
    ends_phase: bool
    done: bool
    progress: float
    dropped: Mapping[str, int] = field(default_factory=dict)


class Scheduler(Protocol):
    """Saved at step boundaries, after accept; a killed step is replayed whole."""

    @property
    def num_steps(self) -> int | None:
        """Steps of the whole schedule, where known beforehand."""
        ...

    def propose(self) -> list[GroupRequest]:
        """What to roll out next, and how many samples of each; it may be nothing."""
        ...

    def accept(self, groups: Sequence[RolloutGroup]) -> Decision:
        """Take the groups of the last proposal, in any order."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """JSON values only."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


def split_incomplete(groups: Sequence[RolloutGroup]) -> tuple[list[RolloutGroup], int]:
    """The groups whose every completion came, and how many lack one after the engine's retries."""
    complete = [g for g in groups if all(r.completion.error is None for r in g.rollouts)]
    return complete, len(groups) - len(complete)


def reused(group: RolloutGroup) -> tuple[Rollout, ...]:
    """The rollouts of a trained group that were asked for as a profile, and charged as one."""
    return group.rollouts[: group.request.num_samples] if group.request.purpose is Purpose.PROFILE else ()


def in_order(groups: Sequence[RolloutGroup], requests: Sequence[GroupRequest]) -> list[RolloutGroup]:
    """The groups in the order of their requests. A query may be asked for twice, on different visits."""
    place = {(request.query.query_id, request.visit): i for i, request in enumerate(requests)}
    return sorted(groups, key=lambda group: place[group.query.query_id, group.request.visit])
