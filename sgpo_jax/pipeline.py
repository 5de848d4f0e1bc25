"""The stages of a run in order, each reading and writing files of the run directory; done stages are skipped."""

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
from filelock import FileLock, Timeout
from flax import nnx
from jax.sharding import Mesh

from sgpo_jax import planning, profiling
from sgpo_jax.algorithms.compute import Ledger, Stage, TokenCounts
from sgpo_jax.checkpoints import Checkpoints, abstract_like
from sgpo_jax.config import Config, differences, dump_config, load_config, source_name
from sgpo_jax.data.batching import batch_shape
from sgpo_jax.data.queries import LoadedQueries, load_queries, overlap
from sgpo_jax.data.templates import PromptTemplate, load_tokenizer, stop_token_ids
from sgpo_jax.evaluation import evaluate, summary
from sgpo_jax.files import digest_files, read_json, write_json, write_text
from sgpo_jax.models.architecture import Architecture, read_architecture
from sgpo_jax.models.qwen import Transformer
from sgpo_jax.models.safetensors import export_model, load_model, resolve_model_dir
from sgpo_jax.models.sharding import make_mesh, num_batch_shards
from sgpo_jax.models.weights import num_parameters
from sgpo_jax.rewards import VerifierPool
from sgpo_jax.rollouts.collect import Collector
from sgpo_jax.rollouts.jax_engine import JaxEngine
from sgpo_jax.schedulers import SGPOScheduler
from sgpo_jax.telemetry import Metrics, format_flops, make_trackers, say, show_table
from sgpo_jax.training.loop import TrainingParts, train
from sgpo_jax.training.state import initial_state
from sgpo_jax.training.step import TrainStep
from sgpo_jax.types import Query, SamplingParams, UserError

INITIAL, FINAL = "initial", "final"  # names of the evaluations before and after training


class Run:
    """One run directory under its lock, and what its stages share, each part made when it is first needed."""

    def __init__(self, config: Config, mesh: Mesh | None) -> None:
        self.config = config
        self.dir = Path(config.run_dir)
        self.mesh = mesh

    @cached_property
    def model_dir(self) -> Path:
        return resolve_model_dir(self.config.model.path)

    @cached_property
    def arch(self) -> Architecture:
        return read_architecture(self.model_dir)

    @cached_property
    def num_params(self) -> int:
        return num_parameters(self.arch)

    @cached_property
    def tokenizer(self) -> Any:
        return load_tokenizer(self.model_dir)

    @cached_property
    def loaded(self) -> LoadedQueries:
        """The training queries."""
        loaded = load_queries(self.config.data.train, self.config.data, self.tokenizer, self.config.seed)
        for line in loaded.report.lines():
            say(f"data: {line}")
        return loaded

    @cached_property
    def queries(self) -> dict[str, Query]:
        return {query.query_id: query for query in self.loaded.queries}

    @cached_property
    def evaluation_sets(self) -> dict[str, tuple[Query, ...]]:
        sets = {}
        for source in self.config.evaluate.sets:
            sets[source_name(source)] = load_queries(
                [source], self.config.data, self.tokenizer, self.config.seed
            ).queries
        shared = overlap(self.loaded.queries, [query for queries in sets.values() for query in queries])
        for found in shared:
            say(f"data: warning: {found.line()}")
        return sets

    @cached_property
    def model(self) -> Transformer:
        """With the initial weights. The trainer's first update consumes them."""
        say(f"model: loading {self.model_dir} ({self.num_params / 1e6:.1f} M parameters)")
        model = self.config.model
        return load_model(self.model_dir, compute_dtype=model.compute_dtype, remat=model.remat, mesh=self.mesh)

    @cached_property
    def engine(self) -> JaxEngine:
        return JaxEngine(
            self.model,
            stop_ids=stop_token_ids(self.model_dir, self.tokenizer),
            max_prompt_tokens=self.longest_prompt,
            config=self.config.rollouts,
            run_seed=self.config.seed,
        )

    @cached_property
    def verifiers(self) -> VerifierPool:
        return VerifierPool(self.config.rewards)

    @cached_property
    def collector(self) -> Collector:
        def decode(token_ids: Sequence[int]) -> str:
            return self.tokenizer.decode(token_ids, skip_special_tokens=True)

        return Collector(self.engine, self.verifiers, decode, self.config.rewards)

    @cached_property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt of training and evaluation."""
        everything = [*self.loaded.queries, *(q for queries in self.evaluation_sets.values() for q in queries)]
        return max(len(query.prompt_ids) for query in everything)

    @cached_property
    def checkpoints(self) -> Checkpoints:
        return Checkpoints(self.dir / "checkpoints", self.config.train.keep_checkpoints)

    @cached_property
    def profile_identity(self) -> profiling.ProfileIdentity:
        return profiling.ProfileIdentity(
            model=digest_files(sorted([self.model_dir / "config.json", *self.model_dir.glob("*.safetensors")])),
            template=PromptTemplate(self.config.data, self.tokenizer).digest(),
            verifier=profiling.verifier_digest(self.config),
            sampling=profiling.profile_sampling(self.config),
        )

    def close(self) -> None:
        """End what was started; only that."""
        for name in ("engine", "verifiers", "checkpoints"):
            if name in self.__dict__:
                getattr(self, name).close()


@contextmanager
def open_run(config: Config) -> Iterator[Run]:
    """Lock the run directory for as long as the block lasts, and hold it to one configuration.

    Raises UserError: the directory cannot be written, is in use, or belongs to another configuration.
    """
    run_dir = Path(config.run_dir)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        lock = FileLock(run_dir / ".lock")
        lock.acquire(timeout=0)
    except Timeout:
        raise UserError(f"run_dir={run_dir}: another process is running in it; wait for it or name another") from None
    except OSError as error:
        raise UserError(f"run_dir={run_dir}: cannot be written: {error.strerror}; name another") from None
    try:
        _hold_to(config, run_dir)
        everything = make_mesh(config.mesh)
        mesh = everything if everything.size > 1 else None  # on one device there is nothing to lay out
        with nullcontext() if mesh is None else jax.set_mesh(mesh):
            run = Run(config, mesh)
            try:
                yield run
            finally:
                run.close()
    finally:
        lock.release()


def config_of(run_dir: Path) -> Config:
    """The configuration that a run directory was made with. Raises UserError where it is none."""
    path = run_dir / "config.yaml"
    if not path.exists():
        raise UserError(f"{run_dir}: not a run directory (it has no config.yaml)")
    return load_config(path, [f"run_dir={json.dumps(str(run_dir))}"])  # it may have been moved


def _hold_to(config: Config, run_dir: Path) -> None:
    """A directory that holds results belongs to the configuration that made them; an empty one takes any."""
    if any(
        (run_dir / name).exists() for name in ("profile.jsonl", "plan.json", "eval", "metrics.jsonl", "checkpoints")
    ):
        changed = differences(config_of(run_dir), config)
        if changed:
            raise UserError(
                f"run_dir={run_dir}: belongs to another configuration ({'; '.join(changed)}); "
                "name another run_dir, or set these back"
            )
    write_text(run_dir / "config.yaml", dump_config(config))


def run_all(run: Run) -> None:
    """Profile, plan, evaluate, train, evaluate, and say what came of it."""
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
    profile = profiling.make_profile(queries, run.collector, run.config, run.profile_identity, run.dir)
    write_json(run.dir / "compute.json", _ledger_before_training(run).to_dict())
    return profile


def plan_stage(run: Run) -> None:
    """Make plan.json from the profile and show it, with the forecast and the first prompt as the model sees it."""
    profile = _profile_of(run)
    path = run.dir / "plan.json"
    plan = planning.read_plan(path) if path.exists() else planning.make_plan(profile.rows, run.config)
    forecasts = planning.forecast_plan(plan, profile.rows, run.queries, run.config, run.num_params)
    planning.write_plan(path, plan, forecasts)
    planning.show_plan(plan, profile.rows, forecasts, run.config)
    say(f"plan: the first query's prompt is {run.loaded.queries[0].prompt!r}")


def train_stage(run: Run) -> None:
    """Train through the plan's phases; a finished training is left as it is."""
    if _is_trained(run):
        return
    plan = planning.read_plan(run.dir / "plan.json")
    unknown = next((q for phase in plan.phases for q in phase.query_ids if q not in run.queries), None)
    if unknown:
        raise UserError(f"{run.dir / 'plan.json'}: query {unknown} is not in data.train; plan again in a new run_dir")
    config = run.config
    scheduler = SGPOScheduler(
        plan.phases, run.queries, prompts_per_step=config.train.prompts_per_step, seed=config.seed
    )
    step = TrainStep(run.model, config, scheduler.num_steps * config.train.num_updates)
    trackers = make_trackers(config.telemetry, run.dir, config.model_dump(mode="json"))
    metrics = Metrics(run.dir / "metrics.jsonl", trackers)
    parts = TrainingParts(
        config=config,
        run_dir=run.dir,
        scheduler=scheduler,
        collector=run.collector,
        step=step,
        shape=batch_shape(
            run.longest_prompt,
            config.rollouts.max_completion_tokens,
            config.train.micro_batch_tokens,
            num_batch_shards(),
        ),
        checkpoints=run.checkpoints,
        metrics=metrics,
        evaluate=lambda step: _evaluate(run, f"step-{step:06d}", config.evaluate.num_samples_during, visit=step),
        # A killed run makes the same export again.
        export=lambda params, phase: _export(run, params, run.dir / "hf" / phase, overwrite=True),
    )
    try:
        state = initial_state(nnx.state(run.model), step.optimizer)
        train(parts, state, _ledger_before_training(run))
    finally:
        metrics.close()


def evaluate_stage(run: Run, name: str) -> None:
    """Evaluate the initial weights, or those of the newest checkpoint; eval/NAME.json says it was done."""
    if not run.config.evaluate.sets or (run.dir / "eval" / f"{name}.json").exists():
        return
    if name == FINAL:
        restored = run.checkpoints.restore({"params": abstract_like(nnx.state(run.model))})
        run.engine.update_weights(restored.arrays["params"], restored.step)
    _evaluate(run, name, run.config.evaluate.num_samples, visit=0)
    before = name == INITIAL
    write_json(run.dir / "compute.json", (_ledger_before_training if before else _ledger_after_training)(run).to_dict())


def evaluate_newest(run: Run) -> None:
    """The final evaluation of a trained run, the initial one of a run that is not trained yet."""
    if not run.config.evaluate.sets:
        raise UserError("evaluate.sets is empty: nothing to evaluate on")
    evaluate_stage(run, FINAL if _is_trained(run) else INITIAL)
    show_results(run)


def _evaluate(run: Run, name: str, num_samples: int, *, visit: int) -> tuple[dict[str, float], TokenCounts]:
    """Write eval/NAME.json; returns its figures as metrics, and the tokens it took."""
    config = run.config.evaluate
    sampling = SamplingParams(run.config.rollouts.max_completion_tokens, config.temperature, config.top_p)
    scores = evaluate(
        run.evaluation_sets, run.collector, sampling, num_samples=num_samples, visit=visit, seed=run.config.seed
    )
    write_json(run.dir / "eval" / f"{name}.json", {set_: score.to_dict() for set_, score in scores.items()})
    return summary(scores), sum((score.counts for score in scores.values()), TokenCounts())


def export_run(run: Run, out: Path, step: int | None) -> None:
    """Export a checkpoint of a run (the newest by default) as a Hugging Face directory.

    Raises UserError: no such checkpoint, or `out` exists.
    """
    restored = run.checkpoints.restore({"params": abstract_like(nnx.state(run.model))}, step)
    _export(run, restored.arrays["params"], out, overwrite=False)
    say(f"export: step {restored.step} is in {out}")


def _export(run: Run, params: nnx.State, out: Path, *, overwrite: bool) -> None:
    export = run.config.export
    export_model(
        params,
        run.arch,
        run.model_dir,
        out,
        dtype=export.dtype,
        max_shard_bytes=export.max_shard_mb * 10**6,
        overwrite=overwrite,
    )


def show_results(run: Run) -> None:
    """Accuracy before and after, compute by stage, where things lie, what to do next."""
    before, after = (_read_eval(run, name) for name in (INITIAL, FINAL))
    if before or after:
        show_table(
            "Accuracy on held-out questions",
            ("set", "questions", "before", "after"),
            [
                (name, len(run.evaluation_sets[name]), _accuracy(before, name), _accuracy(after, name))
                for name in run.evaluation_sets
            ],
        )
    if not (run.dir / "compute.json").exists():
        return
    ledger = Ledger.from_dict(read_json(run.dir / "compute.json"))
    stages = ledger.to_dict()["stages"]
    show_table(
        "Compute by stage",
        ("stage", "generated tokens", "trained tokens", "paper FLOPs", "itemised FLOPs"),
        [
            (
                stage,
                f"{ledger.tokens[stage].generated:,}",
                f"{ledger.tokens[stage].trained:,}",
                format_flops(stages[stage]["paper"]["flops"]),
                format_flops(stages[stage]["itemised"]["flops"]),
            )
            for stage in Stage
        ]
        + [
            (
                "charged: profiling + training",
                "",
                "",
                format_flops(ledger.paper_flops),
                format_flops(ledger.itemised_flops),
            )
        ],
    )
    exports = (
        sorted((run.dir / "hf").iterdir(), key=lambda path: path.stat().st_mtime) if (run.dir / "hf").exists() else []
    )
    if exports:
        print(f"The trained model is in {exports[-1]}. Try it:")
        prompt = run.loaded.queries[0].question
        raw = " --raw" if run.config.data.template == "plain" else ""
        print(f"  python -m sgpo_jax.launch generate {exports[-1]}{raw} --prompt {shlex.quote(prompt)} --temperature 0")


def _accuracy(scores: Mapping[str, Any] | None, name: str) -> str:
    """avg@k with its 95% interval."""
    if not scores:
        return "-"
    avg = scores[name]["avg"]
    return f"{avg['mean']:.1%} ({avg['low']:.1%} to {avg['high']:.1%})" if avg else "unjudged"


def _read_eval(run: Run, name: str) -> Any:
    path = run.dir / "eval" / f"{name}.json"
    return read_json(path) if path.exists() else None


def _profile_of(run: Run) -> profiling.Profile:
    source = Path(run.config.profile.reuse or run.dir)
    if not profiling.is_complete(source):
        raise UserError(f"{source}: has no complete profile; run `python -m sgpo_jax.launch profile` first")
    return profiling.read_profile(source, run.loaded.queries, run.profile_identity)


def _is_trained(run: Run) -> bool:
    return (run.dir / "checkpoints").is_dir() and bool(run.checkpoints.host().get("done"))


def _ledger_before_training(run: Run) -> Ledger:
    ledger = Ledger(run.num_params).add(Stage.PROFILING, _profile_of(run).counts)
    return ledger.add(Stage.EVALUATION, _evaluation_counts(run, INITIAL))


def _ledger_after_training(run: Run) -> Ledger:
    ledger = Ledger.from_dict(run.checkpoints.host()["ledger"])
    return ledger.add(Stage.EVALUATION, _evaluation_counts(run, FINAL))


def _evaluation_counts(run: Run, name: str) -> TokenCounts:
    scores = _read_eval(run, name) or {}
    return sum((TokenCounts(**score["counts"]) for score in scores.values()), TokenCounts())
