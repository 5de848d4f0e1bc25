"""The stages of a run in order, each reading and writing files of the run directory; done stages are skipped."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from sgpo_jax import comparison, planning, profiling
from sgpo_jax.accounts import account, own_ledger
from sgpo_jax.algorithms.allocation import Plan
from sgpo_jax.checkpoints import abstract_like, read_checkpoint
from sgpo_jax.config import Config
from sgpo_jax.data.batching import batch_shape
from sgpo_jax.evaluation import evaluate, summary
from sgpo_jax.files import write_json
from sgpo_jax.hosts.messages import lead
from sgpo_jax.models.architecture import read_architecture
from sgpo_jax.models.safetensors import abstract_model, export_model, resolve_model_dir
from sgpo_jax.models.sharding import num_batch_shards
from sgpo_jax.models.weights import num_parameters
from sgpo_jax.reporting.results import show_results
from sgpo_jax.run import FINAL, INITIAL, Run, begin, open_run, profile_of
from sgpo_jax.schedulers import make_scheduler
from sgpo_jax.telemetry import Metrics, make_trackers, say
from sgpo_jax.training.loop import TrainingParts, train
from sgpo_jax.training.state import TrainState, initial_state
from sgpo_jax.training.step import TrainStep
from sgpo_jax.types import SamplingParams, UserError


def run_all(run: Run) -> None:
    """Profile and plan (where the method does), evaluate, train, evaluate, and say what came of it."""
    if run.is_profiled:
        profile_stage(run)
        plan_stage(run)
    evaluate_stage(run, INITIAL)
    train_stage(run)
    evaluate_stage(run, FINAL)
    show_results(run)


def profile_stage(run: Run) -> profiling.Profile:
    """Make profile.jsonl and profile.json, or check that they are those of this run."""
    queries, source = run.loaded.queries, run.config.profile.reuse
    if source is not None:
        return profiling.read_profile(Path(source), queries, run.profile_identity)
    if profiling.is_complete(run.dir):
        return profiling.read_profile(run.dir, queries, run.profile_identity)
    begin(run)
    profile = profiling.make_profile(queries, run.collector, run.config, run.profile_identity, run.dir)
    account(run, own_ledger(run))
    return profile


def plan_stage(run: Run) -> None:
    """Make plan.json from the profile and show it, with the forecast and the first prompt as the model sees it."""
    profile = profile_of(run)
    begin(run)
    path = run.dir / "plan.json"
    plan = planning.read_plan(path) if path.exists() else planning.make_plan(profile.rows, run.config)
    forecasts = planning.forecast_plan(plan, profile.rows, run.queries, run.config, run.num_params)
    planning.write_plan(path, plan, forecasts)
    planning.show_plan(plan, profile.rows, forecasts, run.config)
    say(f"plan: the first query's prompt is {run.loaded.queries[0].prompt!r}")


def compare_methods(config: Config) -> None:
    """Show the forecast of every method: of the section `forecast`, where there is one, else of the run's profile."""
    given = config.forecast
    if given is not None:
        num_params = given.num_params or num_parameters(read_architecture(resolve_model_dir(config.model.path)))
        _show_comparison(comparison.workload_of(given, num_params), config)
        return
    with open_run(config) as run:
        workload = profiled_workload(run)
    _show_comparison(workload, config)


def profiled_workload(run: Run) -> comparison.Workload:
    """The workload that the run's profile, or the one it reuses, has found."""
    rows = profile_of(run).rows
    num_samples = run.config.profile.num_samples
    return comparison.Workload(
        planning.histogram(rows, num_samples),
        num_samples,
        planning.mean_lengths(rows, run.queries),
        run.num_params,
    )


def _show_comparison(workload: comparison.Workload, config: Config) -> None:
    comparison.show_comparison(comparison.compare(workload, config), workload, config)


def train_stage(run: Run) -> None:
    """Train to the end of the method's schedule; a finished training is left as it is."""
    if _is_trained(run):
        return
    config = run.config
    plan = _plan_of(run) if run.is_profiled else None
    rows = profile_of(run).rows if run.is_profiled else ()
    if config.rollouts.allow_biased_ratio and config.rollouts.top_p < 1:
        say(f"train: warning: rollouts.top_p={config.rollouts.top_p} biases the probability ratio")
    turns, collector, checkpoints = run.turns, run.collector, run.checkpoints
    lead("train")
    step, state, reference = start_training(run)
    trackers = make_trackers(config.telemetry, run.dir, config.model_dump(mode="json"))
    metrics = Metrics(run.dir / "metrics.jsonl", trackers)
    scheduler = make_scheduler(config, plan, run.queries, rows)
    parts = TrainingParts(
        config=config,
        run_dir=run.dir,
        scheduler=scheduler,
        collector=collector,
        step=step,
        reference=reference,
        shape=batch_shape(
            run.longest_prompt,
            config.rollouts.max_completion_tokens,
            config.train.micro_batch_tokens,
            num_batch_shards(),
        ),
        checkpoints=checkpoints,
        metrics=metrics,
        turns=turns,
        probe=run.probe,
        spent=lambda: own_ledger(run),
        account=lambda own: account(run, own),
        evaluate=lambda step: _evaluate(run, _name_of(step), config.evaluate.num_samples_during, step),
        # A killed run makes the same export again.
        export=lambda params, phase: _export(run, params, run.dir / "hf" / phase, overwrite=True),
    )
    try:
        train(parts, state)
    finally:
        metrics.close()
    lead("trained")


def start_training(run: Run) -> tuple[TrainStep, TrainState, Any]:
    """The update, the state before the first of them, and the parameters that the KL divergence is from, if any."""
    step = TrainStep(run.model, run.config)
    params = run.turns.trainer(run.params)
    # A copy, since the first update consumes the initial weights.
    reference = run.turns.aside(jax.tree.map(jnp.copy, params)) if run.config.train.loss.kl_coef else None
    return step, initial_state(params, step.optimizer), reference


def evaluate_stage(run: Run, name: str) -> None:
    """Evaluate the initial weights, or those of the newest checkpoint; eval/NAME.json says it was done."""
    if not run.config.evaluate.sets or (run.dir / "eval" / f"{name}.json").exists():
        return
    begin(run)
    step = 0
    if name != INITIAL:
        run.turns.trainer(())
        restored = run.checkpoints.restore({"params": abstract_like(nnx.state(run.model))})
        step, params = restored.step, restored.arrays["params"]
        probe = run.probe(params)
        run.engine.update_weights(run.turns.sampler(params), step, probe)
    _evaluate(run, name, run.config.evaluate.num_samples, step)
    account(run, own_ledger(run))


def evaluate_newest(run: Run) -> None:
    """The newest weights: the final evaluation after training, else one of the newest checkpoint, or of the start."""
    if not run.config.evaluate.sets:
        raise UserError("evaluate.sets is empty: nothing to evaluate on")
    step = run.checkpoints.latest_step if (run.dir / "checkpoints").is_dir() else None
    evaluate_stage(run, INITIAL if step is None else FINAL if _is_trained(run) else _name_of(step))
    show_results(run)


def _name_of(step: int) -> str:
    """Of the evaluation of the weights after a step of training."""
    return f"step-{step:06d}"


def _evaluate(run: Run, name: str, num_samples: int, step: int) -> dict[str, float]:
    """Evaluate the engine's weights, those after `step` steps, and write eval/NAME.json. Returns what to log."""
    config = run.config.evaluate
    sampling = SamplingParams(run.config.rollouts.max_completion_tokens, config.temperature, config.top_p)
    scores = evaluate(
        run.evaluation_sets, run.collector, sampling, num_samples=num_samples, visit=step, seed=run.config.seed
    )
    write_json(run.dir / "eval" / f"{name}.json", {set_: score.to_dict() for set_, score in scores.items()})
    return summary(scores)


def export_run(config: Config, out: Path, step: int | None) -> None:
    """Export a checkpoint of a run (the newest by default) as a Hugging Face directory. Only reads the run directory.

    Raises UserError: no such checkpoint, or `out` exists.
    """
    if out.exists():
        raise UserError(f"{out}: exists already; name another directory or remove it")
    run = Run(config, mesh=None)
    model = abstract_model(run.arch, compute_dtype=config.model.compute_dtype, remat=config.model.remat)
    restored = read_checkpoint(run.dir / "checkpoints", {"params": nnx.state(model)}, step)
    _export(run, restored.arrays["params"], out, overwrite=False)
    say(f"export: step {restored.step} is in {out}")


def _export(run: Run, params: nnx.State, out: Path, *, overwrite: bool) -> None:
    export = run.config.export
    lead("export")
    export_model(
        params,
        run.arch,
        run.model_dir,
        out,
        dtype=export.dtype,
        max_shard_bytes=export.max_shard_mb * 10**6,
        overwrite=overwrite,
    )


def _plan_of(run: Run) -> Plan:
    path = run.dir / "plan.json"
    plan = planning.read_plan(path)
    unknown = next((q for phase in plan.phases for q in phase.query_ids if q not in run.queries), None)
    if unknown:
        raise UserError(f"{path}: query {unknown} is not in data.train; plan again in a new run_dir")
    return plan


def _is_trained(run: Run) -> bool:
    return (run.dir / "checkpoints").is_dir() and bool(run.checkpoints.host().get("done"))
