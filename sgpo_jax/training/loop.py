"""The training loop: propose, roll out, judge, update. It has no branch on the method; that is the scheduler's."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from sgpo_jax.algorithms.compute import Ledger, Stage, TokenCounts
from sgpo_jax.checkpoints import Checkpoints
from sgpo_jax.config import Config, EvaluateConfig
from sgpo_jax.data.batching import Batch, BatchShape, padding_frac
from sgpo_jax.files import write_jsonl
from sgpo_jax.models.sharding import on_devices
from sgpo_jax.rollouts.collect import Collector
from sgpo_jax.rollouts.engine import Probe
from sgpo_jax.rollouts.turns import Turns
from sgpo_jax.schedulers import Decision, Scheduler
from sgpo_jax.telemetry import Metrics, Stopwatch, progress, say
from sgpo_jax.training.metrics import rollout_metrics, rollout_sample, update_metrics
from sgpo_jax.training.state import TrainState, learning_rate, restore
from sgpo_jax.training.step import TrainStep, UpdateResult
from sgpo_jax.training.updates import make_updates, trained_counts
from sgpo_jax.types import MachineError, Purpose, RolloutGroup, SamplingParams

_STAGES = {Purpose.PROFILE: Stage.PROFILING, Purpose.TRAIN: Stage.TRAINING}


@dataclass(frozen=True)
class TrainingParts:
    """What the loop works with, made by the pipeline.

    reference: parameters that the KL divergence is from, None without one; never donated, and set aside.
    spent(): the loop's own ledger as it was last written. account(own): write it, and give the ledger of the whole run.
    turns: whose turn it is on the devices, the engine's or the trainer's.
    probe(params): what the engine is held to after it got a copy of them; None where it shares them.
    evaluate(step): figures of an evaluation of the engine's weights; it writes its own file.
    export(params, phase): to Hugging Face.
    """

    config: Config
    run_dir: Path
    scheduler: Scheduler
    collector: Collector
    step: TrainStep
    reference: Any
    shape: BatchShape
    checkpoints: Checkpoints
    metrics: Metrics
    spent: Callable[[], Ledger]
    account: Callable[[Ledger], Ledger]
    turns: Turns
    probe: Callable[[Any], Probe | None]
    evaluate: Callable[[int], dict[str, float]]
    export: Callable[[Any, str], None]


@dataclass
class _Progress:
    """Where training stands; what a checkpoint holds beside the arrays."""

    step: int = 0
    share: float = 0.0  # of the schedule that is over
    num_nonfinite: int = 0  # updates in a row that changed nothing
    done: bool = False
    failure: MachineError | None = None  # the engine cannot be brought to the newest weights: the step is the last
    ledger: Ledger = field(default_factory=lambda: Ledger(0))


def train(parts: TrainingParts, state: TrainState) -> TrainState:
    """Train to the end of the schedule, from the newest checkpoint where there is one.

    Every step leaves a line in metrics.jsonl; a checkpoint is written last, so that a killed run repeats whole steps
    and nothing else. Raises MachineError after train.max_nonfinite_steps updates in a row that were not finite, and
    where the engine cannot be brought to the new weights; the step is then saved first.
    """
    state, at = _resume(parts, state)
    config = parts.config
    rollouts = config.rollouts
    sampling = SamplingParams(rollouts.max_completion_tokens, rollouts.temperature, rollouts.top_p)
    state, probe = _hand_over(parts, state)
    _sync(parts, state, probe)
    with progress("train", parts.scheduler.num_steps, done=at.step) as bar:
        while not at.done:
            with _accounted(parts, at):
                state, note = _step(parts, state, at, sampling)
            bar.advance(note=note)
    parts.checkpoints.wait()
    return state


def _step(parts: TrainingParts, state: TrainState, at: _Progress, sampling: SamplingParams) -> tuple[TrainState, str]:
    """Roll out, update, sync; all that the step leaves behind. Also returns what to show of it."""
    watch = Stopwatch()
    decision, groups = _roll_out(parts, at, sampling, watch)
    at.done = decision.done
    with watch.time("update"):
        state = parts.turns.trainer(state)
        state, results, batches = _update(parts, state, decision)
    at.step += 1
    at.ledger = at.ledger.add(Stage.TRAINING, trained_counts(decision.train, parts.config))
    with watch.time("sync"):
        state, probe = _hand_over(parts, state)
        try:
            sync = _sync(parts, state, probe)
        except MachineError as error:
            at.failure, sync = error, {}
    line = _finish_step(parts, state, at, decision, groups, results, batches, sync, watch)
    return state, f"{decision.phase}  " + (f"accuracy {line['rollouts/accuracy']:.3f}" if groups else "nothing sampled")


@contextmanager
def _accounted(parts: TrainingParts, at: _Progress) -> Iterator[None]:
    """However a step ends, what it has spent so far is written; what will be repeated is then known as wasted."""
    try:
        yield
    except BaseException:
        parts.account(at.ledger)
        raise


def _resume(parts: TrainingParts, state: TrainState) -> tuple[TrainState, _Progress]:
    latest = parts.spent()
    at = _Progress(ledger=Ledger(latest.num_params))
    if parts.checkpoints.latest_step is not None:
        state, restored = restore(parts.checkpoints, state)
        host = restored.host
        parts.scheduler.load_state_dict(host["scheduler"])
        ledger = Ledger.from_dict(host["ledger"])
        at = _Progress(restored.step, host["progress"], host["num_nonfinite"], host["done"], ledger=ledger)
        say(f"train: resumed at step {at.step}")
    at.ledger = at.ledger.resumed(latest)
    parts.account(at.ledger)
    parts.metrics.rewind(at.step)
    return state, at


def _roll_out(
    parts: TrainingParts, at: _Progress, sampling: SamplingParams, watch: Stopwatch
) -> tuple[Decision, list[RolloutGroup]]:
    """Propose and roll out until the scheduler has a step's groups; gives all that were generated for it."""
    groups: list[RolloutGroup] = []
    while True:
        requests = parts.scheduler.propose()
        with watch.time("generate"):
            new = list(parts.collector.collect(requests, sampling))
        watch.move(parts.collector.waited_s, "generate", "verify")
        for purpose, stage in _STAGES.items():
            at.ledger = at.ledger.add(stage, _generated([g for g in new if g.request.purpose is purpose]))
        groups += new
        decision = parts.scheduler.accept(new)
        if decision.ready:
            return decision, groups


def _update(
    parts: TrainingParts, state: TrainState, decision: Decision
) -> tuple[TrainState, list[UpdateResult], list[Batch]]:
    """The optimizer updates of one step."""
    config = parts.config
    reference = jax.tree.map(on_devices, parts.reference)
    updates = make_updates(decision.train, parts.step, state.params, reference, parts.shape, config)
    del reference  # where it waits elsewhere, this is a copy
    results = []
    for batches in updates:
        rate = learning_rate(config.train.optimizer, int(state.num_updates), decision.progress)
        state, result = parts.step.update(state, batches, rate)
        results.append(result)
    return state, results, [batch for batches in updates for batch in batches]


def _hand_over(parts: TrainingParts, state: TrainState) -> tuple[TrainState, Probe | None]:
    """The devices to the engine, with the probe of the weights that it is to have."""
    probe = parts.probe(state.params)
    return parts.turns.sampler(state), probe


def _sync(parts: TrainingParts, state: TrainState, probe: Probe | None) -> Mapping[str, float]:
    """Bring the engine to the newest weights."""
    return parts.collector.engine.update_weights(state.params, int(state.num_updates), probe)


def _finish_step(
    parts: TrainingParts,
    state: TrainState,
    at: _Progress,
    decision: Decision,
    groups: Sequence[RolloutGroup],
    results: Sequence[UpdateResult],
    batches: Sequence[Batch],
    sync: Mapping[str, float],
    watch: Stopwatch,
) -> dict[str, Any]:
    """Everything that a step leaves behind, the checkpoint last. Returns its line of metrics."""
    config = parts.config.train
    if results:  # a step without an update says nothing
        at.num_nonfinite = 0 if all(r.is_finite for r in results) else at.num_nonfinite + 1
    line: dict[str, Any] = {
        "phase": decision.phase,
        **rollout_metrics(groups, decision),
        **update_metrics(results),
        **sync,
    }
    line["train/num_updates"] = int(state.num_updates)
    line["train/num_nonfinite_in_row"] = at.num_nonfinite
    line["perf/padding_frac"] = padding_frac(batches)
    line["perf/num_compilations"] = parts.step.num_compilations
    if config.sample_rollouts:
        rows = rollout_sample(groups, config.sample_rollouts, at.step, decision.phase)
        write_jsonl(parts.run_dir / "rollouts" / f"step-{at.step:06d}.jsonl", rows)
    can_sample = not at.done and at.failure is None
    if can_sample and _is_evaluation_due(parts.config.evaluate, at.step, at.share, decision.progress):
        with watch.time("evaluate"):
            line |= parts.evaluate(at.step)
    at.share = decision.progress
    spent = parts.account(at.ledger)
    line["compute/paper_flops"] = spent.paper_flops
    line["compute/itemised_flops"] = spent.itemised_flops
    line |= {f"seconds/{name}": seconds for name, seconds in watch.seconds().items()}
    parts.metrics.log(at.step, line)
    if decision.ends_phase and config.export_phases:
        parts.export(state.params, decision.phase)
    if decision.ends_phase or at.done or at.step % config.checkpoint_every == 0 or at.failure is not None:
        _save(parts, state, at)
    if at.failure is not None:
        raise at.failure
    if at.num_nonfinite >= config.max_nonfinite_steps:
        raise MachineError(
            f"step {at.step}: {at.num_nonfinite} steps in a row had a loss or gradient that is not finite; the weights "
            "are those before them. Lower train.optimizer.learning_rate, and train in a new run_dir"
        )
    return line


def _is_evaluation_due(config: EvaluateConfig, step: int, before: float, after: float) -> bool:
    """before, after: the share of the schedule that was over before this step, and is after it."""
    if config.every:
        return step % config.every == 0
    return config.times > 0 and int(after * (config.times + 1)) > int(before * (config.times + 1))


def _save(parts: TrainingParts, state: TrainState, at: _Progress) -> None:
    host = {
        "scheduler": parts.scheduler.state_dict(),
        "ledger": at.ledger.to_dict(),
        "progress": at.share,
        "num_nonfinite": at.num_nonfinite,
        "done": at.done,
    }
    parts.checkpoints.save(at.step, state.parts, host)


def _generated(groups: Sequence[RolloutGroup]) -> TokenCounts:
    return TokenCounts(
        generated=sum(group.num_tokens for group in groups),
        prompt_generated=sum(len(group.query.prompt_ids) for group in groups),
    )
