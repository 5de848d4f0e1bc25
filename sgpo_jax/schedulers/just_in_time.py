"""Just-in-time profiling with reuse: small chunks are profiled by the current policy, and trained on at once."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sgpo_jax.algorithms.greso import Outcome, outcome_of
from sgpo_jax.config import JustInTimeConfig, RefillConfig
from sgpo_jax.schedulers.base import Decision, in_order, split_incomplete
from sgpo_jax.schedulers.carried import group_from_json, group_to_json
from sgpo_jax.schedulers.order import ShuffledOrder
from sgpo_jax.schedulers.shortage import shortage
from sgpo_jax.types import GroupRequest, Purpose, Query, RolloutGroup


@dataclass(frozen=True, slots=True)
class _Kept:
    """An informative probe that waits for its step. place: of its query in the order of all epochs, from 1."""

    place: int
    group: RolloutGroup


@dataclass
class _Step:
    """What the rounds of one step have brought so far; outcomes: of its judged probes."""

    num_rounds: int = 0
    outcomes: Counter[Outcome] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)


class JustInTimeScheduler:
    """Probes each chunk of queries with the policy of the moment, and trains the probes whose outcomes differ.

    An epoch probes every query once, in a shuffled order, with num_samples completions; it is one phase, named e1, e2.
    A chunk is probed whenever fewer informative probes are left than a step takes. They are trained in their order,
    each filled up to group_size by fresh rollouts of the policy of its step; what exceeds a step is carried over, so
    that its log-probabilities are those of an older policy (train.loss.old_logprobs=sampler). All other probes are
    dropped. The last step of an epoch may be short, or without any group.

    A departure from sGPO (arXiv 2606.08854, section 4.1), which profiles once, with the initial policy, and trains on
    none of it; near to dynamic sampling (DAPO, arXiv 2503.14476, section 3.2), but for what is charged: a probe costs
    what profiling does, and the rest of a rollout only where it is trained.
    """

    def __init__(
        self,
        queries: Mapping[str, Query],
        config: JustInTimeConfig,
        *,
        epochs: int,
        prompts_per_step: int,
        refill: RefillConfig,
        seed: int,
    ) -> None:
        self._queries = queries
        self._config = config
        self._num_fresh = config.group_size - config.num_samples
        self._prompts_per_step = prompts_per_step
        self._refill = refill
        self._num_places = epochs * len(queries)
        self._order = ShuffledOrder([sorted(queries)] * epochs, [config.chunk_queries] * epochs, seed)
        self._num_probed = 0  # places of the order
        self._kept: list[_Kept] = []
        self._step = _Step()
        self._requests: list[GroupRequest] = []

    @property
    def num_steps(self) -> None:
        """It depends on how many probes are informative."""
        return None

    def propose(self) -> list[GroupRequest]:
        self._requests = self._probes() if self._needs_probes() else self._fills()
        return self._requests

    def accept(self, groups: Sequence[RolloutGroup]) -> Decision:
        complete, num_incomplete = split_incomplete(groups)
        self._step.dropped["incomplete"] += num_incomplete
        complete = in_order(complete, self._requests)
        if any(request.purpose is Purpose.PROFILE for request in self._requests):
            self._keep(complete)
            if self._needs_probes() or self._num_fresh:
                return self._not_yet()
            complete = []
        return self._finish(complete)

    def state_dict(self) -> dict[str, Any]:
        kept = [{"place": kept.place, "group": group_to_json(kept.group)} for kept in self._kept]
        return {"order": self._order.state_dict(), "num_probed": self._num_probed, "kept": kept}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._order.load_state_dict(state["order"])
        self._num_probed = state["num_probed"]
        self._kept = [_Kept(kept["place"], group_from_json(kept["group"], self._queries)) for kept in state["kept"]]
        self._step = _Step()

    @property
    def _is_epoch_probed(self) -> bool:
        """Whether all of the epoch's queries were, of the epoch that the step belongs to."""
        return self._num_probed % len(self._queries) == 0 and bool(self._kept or self._step.num_rounds)

    def _needs_probes(self) -> bool:
        """Raises UserError after refill.max_rounds rounds, with refill.when_short=error."""
        if len(self._kept) >= self._prompts_per_step or self._is_epoch_probed:
            return False
        is_over = self._step.num_rounds == self._refill.max_rounds
        if is_over and self._refill.when_short == "error":
            raise shortage(
                self._refill,
                self._step.outcomes,
                len(self._kept),
                self._prompts_per_step,
                tried=("chunks", "probes"),
                more="more just_in_time.num_samples or chunk_queries",
            )
        return not is_over

    def _probes(self) -> list[GroupRequest]:
        self._step.num_rounds += 1
        chunk = next(self._order)
        return [
            GroupRequest(self._queries[query_id], self._config.num_samples, Purpose.PROFILE, visit=chunk.stretch)
            for query_id in chunk.items
        ]

    def _fills(self) -> list[GroupRequest]:
        """What the step's groups lack, if anything."""
        if not self._num_fresh:
            return []
        return [
            replace(
                kept.group.request,
                num_samples=self._num_fresh,
                purpose=Purpose.TRAIN,
                first_sample=self._config.num_samples,
            )
            for kept in self._kept[: self._prompts_per_step]
        ]

    def _keep(self, probes: Sequence[RolloutGroup]) -> None:
        place_of = {request.query.query_id: i for i, request in enumerate(self._requests, start=self._num_probed + 1)}
        self._num_probed += len(self._requests)
        for probe in probes:
            if not probe.num_judged:
                self._step.dropped["unjudged"] += 1
                continue
            outcome = outcome_of(probe.num_correct, probe.num_judged)
            self._step.outcomes[outcome] += 1
            if outcome is Outcome.MIXED:
                self._kept.append(_Kept(place_of[probe.query.query_id], probe))
            else:
                self._step.dropped[outcome] += 1

    def _not_yet(self) -> Decision:
        return Decision(
            train=(),
            ready=False,
            phase=self._phase(self._num_probed),
            ends_phase=False,
            done=False,
            progress=self._num_probed / self._num_places,
        )

    def _finish(self, fills: Sequence[RolloutGroup]) -> Decision:
        """The step, of the probes that came first; one whose fill lacks rollouts is left out."""
        size, num_queries = self._prompts_per_step, len(self._queries)
        taken, self._kept = self._kept[:size], self._kept[size:]
        step, self._step = self._step, _Step()
        ends_epoch = not self._kept and self._num_probed % num_queries == 0
        place = taken[-1].place if taken and not ends_epoch else self._num_probed
        return Decision(
            train=self._filled([kept.group for kept in taken], fills),
            ready=True,
            phase=self._phase(place),
            ends_phase=ends_epoch,
            done=ends_epoch and place == self._num_places,
            progress=place / self._num_places,
            dropped={str(reason): count for reason, count in step.dropped.items() if count},
        )

    def _filled(self, probes: Sequence[RolloutGroup], fills: Sequence[RolloutGroup]) -> tuple[RolloutGroup, ...]:
        if not self._num_fresh:
            return tuple(probes)
        fresh_of = {fill.query.query_id: fill.rollouts for fill in fills}
        return tuple(
            replace(probe, rollouts=probe.rollouts + fresh_of[probe.query.query_id])
            for probe in probes
            if probe.query.query_id in fresh_of
        )

    def _phase(self, place: int) -> str:
        return f"e{(place - 1) // len(self._queries) + 1}"
