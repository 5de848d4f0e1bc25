"""The training loop: propose, roll out, judge, update. It has no branch on the method; that is the scheduler's."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

from sgpo_jax.algorithms.compute import Ledger, Stage, TokenCounts
from sgpo_jax.checkpoints import Checkpoints, abstract_like
from sgpo_jax.config import Config
from sgpo_jax.data.batching import Batch, BatchShape, pack, padding_frac
from sgpo_jax.files import read_json, write_json, write_jsonl
from sgpo_jax.rollouts.collect import Collector
from sgpo_jax.schedulers import Decision, Scheduler
from sgpo_jax.telemetry import Metrics, Stopwatch, progress, say
from sgpo_jax.training.metrics import rollout_metrics, rollout_sample, update_metrics
from sgpo_jax.training.sequences import train_sequences
from sgpo_jax.training.state import TrainState
from sgpo_jax.training.step import TrainStep, UpdateResult
from sgpo_jax.types import MachineError, RolloutGroup, SamplingParams


@dataclass(frozen=True)
class TrainingParts:
    """What the loop works with, made by the pipeline.

    evaluate(step): figures of an evaluation of the engine's weights, and the tokens it took; it writes its own files.
    export(params, phase): to Hugging Face.
    """

    config: Config
    run_dir: Path
    scheduler: Scheduler
    collector: Collector
    step: TrainStep
    shape: BatchShape
    checkpoints: Checkpoints
    metrics: Metrics
    evaluate: Callable[[int], tuple[dict[str, float], TokenCounts]]
    export: Callable[[Any, str], None]


@dataclass
class _Progress:
    """Where training stands; what a checkpoint holds beside the arrays."""

    step: int = 0
    num_nonfinite: int = 0  # updates in a row that changed nothing
    done: bool = False
    ledger: Ledger = field(default_factory=lambda: Ledger(0))


def train(parts: TrainingParts, state: TrainState, ledger: Ledger) -> TrainState:
    """Train to the end of the schedule, from the newest checkpoint where there is one.

    `ledger` holds what was spent before training. Every step leaves a line in metrics.jsonl; a checkpoint is written
    last, so that a killed run repeats whole steps and nothing else. Raises MachineError after
    train.max_nonfinite_steps updates in a row that were not finite.
    """
    state, at = _resume(parts, state, ledger)
    config = parts.config
    sampling = SamplingParams(config.rollouts.max_completion_tokens, config.rollouts.temperature)
    parts.collector.engine.update_weights(state.params, int(state.num_updates))
    with progress("train", parts.scheduler.num_steps, done=at.step) as bar:
        while not at.done:
            watch = Stopwatch()
            groups: list[RolloutGroup] = []
            decision: Decision | None = None
            while decision is None or not (decision.ready or decision.done):
                with watch.time("generate"):
                    new = list(parts.collector.collect(parts.scheduler.propose(), sampling))
                groups += new
                decision = parts.scheduler.accept(new)
                at.ledger = at.ledger.add(Stage.TRAINING, _generated(new))
            at.done = decision.done
            if not decision.ready:
                break
            with watch.time("update"):
                state, results, batches = _update(parts, state, decision.train)
                parts.collector.engine.update_weights(state.params, int(state.num_updates))
            at.step += 1
            at.ledger = at.ledger.add(Stage.TRAINING, _trained(decision.train, config))
            line = _finish_step(parts, state, at, decision, groups, results, batches, watch)
            bar.advance(note=f"{decision.phase}  accuracy {line['rollouts/accuracy']:.3f}")
    parts.checkpoints.wait()
    return state


def _resume(parts: TrainingParts, state: TrainState, ledger: Ledger) -> tuple[TrainState, _Progress]:
    at = _Progress(ledger=ledger)
    if parts.checkpoints.latest_step is not None:
        arrays = {"params": state.params, "optimizer": (state.opt_state, state.num_updates)}
        abstract = abstract_like(arrays)
        jax.tree.map(lambda x: x.delete(), arrays)  # room for what is restored
        restored = parts.checkpoints.restore(abstract)
        state = TrainState(restored.arrays["params"], *restored.arrays["optimizer"])
        host = restored.host
        parts.scheduler.load_state_dict(host["scheduler"])
        at = _Progress(restored.step, host["num_nonfinite"], host["done"], Ledger.from_dict(host["ledger"]))
        say(f"train: resumed at step {at.step}")
    path = parts.run_dir / "compute.json"
    if path.exists():
        at.ledger = at.ledger.resumed(Ledger.from_dict(read_json(path)))
        write_json(path, at.ledger.to_dict())
    parts.metrics.rewind(at.step)
    return state, at


def _update(
    parts: TrainingParts, state: TrainState, groups: Sequence[RolloutGroup]
) -> tuple[TrainState, list[UpdateResult], list[Batch]]:
    """The optimizer updates of one step: train.num_updates of them, each on its share of the groups."""
    num_updates = parts.config.train.num_updates
    shares = np.array_split(np.arange(len(groups)), num_updates)
    updates = [
        pack(train_sequences([groups[i] for i in share], parts.config.train.loss), parts.shape) for share in shares
    ]
    if num_updates > 1:  # pi_old is the policy before the first of them
        updates = [parts.step.old_logprobs(state.params, batches) for batches in updates]
    results = []
    for batches in updates:
        if batches and batches[0].num_loss_tokens > 0:
            state, result = parts.step.update(state, batches)
            results.append(result)
    return state, results, [batch for batches in updates for batch in batches]


def _finish_step(
    parts: TrainingParts,
    state: TrainState,
    at: _Progress,
    decision: Decision,
    groups: Sequence[RolloutGroup],
    results: Sequence[UpdateResult],
    batches: Sequence[Batch],
    watch: Stopwatch,
) -> dict[str, Any]:
    """Everything that a step leaves behind, the checkpoint last. Returns its line of metrics."""
    config = parts.config.train
    at.num_nonfinite = 0 if all(r.is_finite for r in results) else at.num_nonfinite + 1
    line: dict[str, Any] = {"phase": decision.phase, **rollout_metrics(groups, decision), **update_metrics(results)}
    line["train/learning_rate"] = parts.step.learning_rate(int(state.num_updates))
    line["train/num_updates"] = int(state.num_updates)
    line["train/num_nonfinite_in_row"] = at.num_nonfinite
    line["perf/padding_frac"] = padding_frac(batches)
    line["perf/num_compilations"] = parts.step.num_compilations
    line["compute/paper_flops"] = at.ledger.paper_flops
    line["compute/itemised_flops"] = at.ledger.itemised_flops
    if config.sample_rollouts:
        rows = rollout_sample(groups, config.sample_rollouts, at.step, decision.phase)
        write_jsonl(parts.run_dir / "rollouts" / f"step-{at.step:06d}.jsonl", rows)
    if parts.config.evaluate.every and at.step % parts.config.evaluate.every == 0 and not at.done:
        with watch.time("evaluate"):
            figures, counts = parts.evaluate(at.step)
        line |= figures
        at.ledger = at.ledger.add(Stage.EVALUATION, counts)
    line |= {f"seconds/{name}": seconds for name, seconds in watch.seconds().items()}
    parts.metrics.log(at.step, line)
    write_json(parts.run_dir / "compute.json", at.ledger.to_dict())
    if decision.ends_phase and config.export_phases:
        parts.export(state.params, decision.phase)
    if decision.ends_phase or at.done or at.step % config.checkpoint_every == 0:
        _save(parts, state, at)
    if at.num_nonfinite >= config.max_nonfinite_steps:
        raise MachineError(
            f"step {at.step}: {at.num_nonfinite} steps in a row had a loss or gradient that is not finite; the weights "
            "are those before them. Lower train.optimizer.learning_rate, and train in a new run_dir"
        )
    return line


def _save(parts: TrainingParts, state: TrainState, at: _Progress) -> None:
    host = {
        "scheduler": parts.scheduler.state_dict(),
        "ledger": at.ledger.to_dict(),
        "num_nonfinite": at.num_nonfinite,
        "done": at.done,
    }
    parts.checkpoints.save(at.step, {"params": state.params, "optimizer": (state.opt_state, state.num_updates)}, host)


def _generated(groups: Sequence[RolloutGroup]) -> TokenCounts:
    return TokenCounts(
        generated=sum(group.num_tokens for group in groups),
        prompt_generated=sum(len(group.query.prompt_ids) for group in groups),
    )


def _trained(groups: Sequence[RolloutGroup], config: Config) -> TokenCounts:
    completions = sum(r.num_tokens for group in groups for r in group.rollouts if r.is_judged)
    prompts = sum(group.num_judged * len(group.query.prompt_ids) for group in groups)
    both = completions + prompts
    return TokenCounts(
        trained=completions,
        prompt_trained=prompts,
        old_logprobs=both if config.train.num_updates > 1 else 0,
        rematerialised=both if config.model.remat == "full" else 0,
    )
