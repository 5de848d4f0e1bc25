"""The stages of a run in order, each reading and writing files of the run directory; done stages are skipped."""

import json
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from filelock import FileLock, Timeout
from flax import nnx
from jax.sharding import Mesh

from sgpo_jax import comparison, planning, profiling
from sgpo_jax.algorithms.allocation import Plan
from sgpo_jax.algorithms.compute import Ledger, Stage, TokenCounts
from sgpo_jax.checkpoints import Checkpoints, abstract_like, read_checkpoint
from sgpo_jax.config import MAY_CHANGE, Config, differences, dump_config, load_config, source_name
from sgpo_jax.data.batching import batch_shape
from sgpo_jax.data.queries import LoadedQueries, load_queries, overlap
from sgpo_jax.data.templates import PromptTemplate, load_tokenizer, stop_token_ids
from sgpo_jax.evaluation import evaluate, summary
from sgpo_jax.files import digest_files, read_json, read_jsonl, sweep, write_json, write_text
from sgpo_jax.models.architecture import Architecture, read_architecture
from sgpo_jax.models.qwen import Transformer
from sgpo_jax.models.safetensors import abstract_model, export_model, load_model, resolve_model_dir
from sgpo_jax.models.sharding import make_mesh, num_batch_shards
from sgpo_jax.models.weights import num_parameters
from sgpo_jax.rewards import VerifierPool
from sgpo_jax.rollouts.collect import Collector
from sgpo_jax.rollouts.engine import Engine, Probe
from sgpo_jax.rollouts.jax_engine import JaxEngine
from sgpo_jax.rollouts.probe import Prober
from sgpo_jax.rollouts.vllm_engine import make_vllm_engine
from sgpo_jax.schedulers import make_scheduler
from sgpo_jax.telemetry import Metrics, check_trackers, format_flops, make_trackers, say, show_table
from sgpo_jax.training.loop import TrainingParts, train
from sgpo_jax.training.state import initial_state
from sgpo_jax.training.step import TrainStep
from sgpo_jax.types import Query, SamplingParams, UserError

INITIAL, FINAL = "initial", "final"  # names of the evaluations before and after training
MODEL_SUFFIXES = (".safetensors", ".json", ".jinja", ".txt", ".model")  # weights, configuration, tokenizer


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
            # The language filter is for what is trained on.
            data = self.config.data.model_copy(update={"language": "any"})
            loaded = load_queries([source], data, self.tokenizer, self.config.seed)
            for line in loaded.report.lines():
                say(f"data: {line}")
            sets[source_name(source)] = loaded.queries
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
    def engine(self) -> Engine:
        """With the initial weights."""
        stop_ids = stop_token_ids(self.model_dir, self.tokenizer)
        if self.config.rollouts.engine == "vllm":
            say("vllm: starting (a minute or two)")
            return make_vllm_engine(
                self.config,
                self.arch,
                self.model_dir,
                stop_ids=stop_ids,
                longest_prompt=self.longest_prompt,
                log=self.dir / "vllm.log",
                initial=(params := nnx.state(self.model)),
                probe=self.probe(params),
            )
        return JaxEngine(
            self.model,
            stop_ids=stop_ids,
            max_prompt_tokens=self.longest_prompt,
            config=self.config.rollouts,
            run_seed=self.config.seed,
        )

    @cached_property
    def prober(self) -> Prober:
        queries = self.loaded.queries[: self.config.vllm.probe_prompts]
        end_id = min(stop_token_ids(self.model_dir, self.tokenizer))
        return Prober(self.model, queries, end_id, chunk_tokens=self.config.model.vocab_chunk_tokens)

    def probe(self, params: nnx.State) -> Probe | None:
        """What an engine that gets a copy of `params` must find; None where it shares the trainer's."""
        return self.prober(params) if self.config.rollouts.engine == "vllm" else None

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

    @property
    def is_profiled(self) -> bool:
        """Whether the method goes by a profile, which is then charged."""
        return self.config.train.method == "sgpo"

    @cached_property
    def profile_identity(self) -> profiling.ProfileIdentity:
        return profiling.ProfileIdentity(
            model=digest_files(sorted(path for path in self.model_dir.iterdir() if path.suffix in MODEL_SUFFIXES)),
            template=PromptTemplate(self.config.data, self.tokenizer).digest(),
            verifier=profiling.verifier_digest(self.config),
            kinds=tuple(sorted({query.kind for query in self.loaded.queries})),
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
        _check_owner(config, run_dir)
        sweep(run_dir)
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


def config_of(run_dir: Path, overrides: Sequence[str] = ()) -> Config:
    """The configuration that a run directory was made with. Raises UserError where it is none."""
    path = run_dir / "config.yaml"
    if not path.exists():
        raise UserError(f"{run_dir}: not a run directory (it has no config.yaml)")
    return load_config(path, [f"run_dir={json.dumps(str(run_dir))}", *overrides])  # it may have been moved


def _check_owner(config: Config, run_dir: Path) -> None:
    """A directory that holds results belongs to the settings that made them; without results it takes any."""
    path = run_dir / "config.yaml"
    if not path.exists():
        return
    try:
        changed = differences(config_of(run_dir), config)
    except UserError:
        raise UserError(f"{path}: is there already, and is no run's configuration; name another run_dir") from None
    has_results = any(
        (run_dir / name).exists() for name in ("profile.jsonl", "plan.json", "eval", "metrics.jsonl", "checkpoints")
    )
    binding = [text for key, text in changed.items() if not key.startswith(MAY_CHANGE)]
    if has_results and binding:
        raise UserError(
            f"run_dir={run_dir}: belongs to another configuration ({'; '.join(binding)}); set these back, or name "
            f"another run_dir (its profile may serve there too: profile.reuse={run_dir})"
        )


def begin(run: Run) -> None:
    """From here on the directory belongs to this configuration; everything that it names has been found."""
    check_trackers(run.config.telemetry)
    longest = run.longest_prompt + run.config.rollouts.max_completion_tokens
    if longest > run.arch.max_positions:
        raise UserError(
            f"the longest prompt ({run.longest_prompt} tokens) with rollouts.max_completion_tokens="
            f"{run.config.rollouts.max_completion_tokens} is longer than the model's {run.arch.max_positions} "
            "positions; lower that, or data.max_prompt_tokens"
        )
    write_text(run.dir / "config.yaml", dump_config(run.config))


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
    _account(run, _own_ledger(run))
    return profile


def plan_stage(run: Run) -> None:
    """Make plan.json from the profile and show it, with the forecast and the first prompt as the model sees it."""
    profile = _profile_of(run)
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
        rows = _profile_of(run).rows
        num_samples = config.profile.num_samples
        workload = comparison.Workload(
            planning.histogram(rows, num_samples),
            num_samples,
            planning.mean_lengths(rows, run.queries, num_samples),
            run.num_params,
        )
    _show_comparison(workload, config)


def _show_comparison(workload: comparison.Workload, config: Config) -> None:
    comparison.show_comparison(comparison.compare(workload, config), workload, config)


def train_stage(run: Run) -> None:
    """Train to the end of the method's schedule; a finished training is left as it is."""
    if _is_trained(run):
        return
    config = run.config
    plan = _plan_of(run) if run.is_profiled else None
    if config.rollouts.allow_biased_ratio and config.rollouts.top_p < 1:
        say(f"train: warning: rollouts.top_p={config.rollouts.top_p} biases the probability ratio")
    step = TrainStep(run.model, config)
    trackers = make_trackers(config.telemetry, run.dir, config.model_dump(mode="json"))
    metrics = Metrics(run.dir / "metrics.jsonl", trackers)
    parts = TrainingParts(
        config=config,
        run_dir=run.dir,
        scheduler=make_scheduler(config, plan, run.queries),
        collector=run.collector,
        step=step,
        # A copy, since the first update consumes the initial weights.
        reference=jax.tree.map(jnp.copy, nnx.state(run.model)) if config.train.loss.kl_coef else None,
        shape=batch_shape(
            run.longest_prompt,
            config.rollouts.max_completion_tokens,
            config.train.micro_batch_tokens,
            num_batch_shards(),
        ),
        checkpoints=run.checkpoints,
        metrics=metrics,
        probe=run.probe,
        spent=lambda: _own_ledger(run),
        account=lambda own: _account(run, own),
        evaluate=lambda step: _evaluate(run, _name_of(step), config.evaluate.num_samples_during, step),
        # A killed run makes the same export again.
        export=lambda params, phase: _export(run, params, run.dir / "hf" / phase, overwrite=True),
    )
    try:
        state = initial_state(nnx.state(run.model), step.optimizer)
        train(parts, state)
    finally:
        metrics.close()


def evaluate_stage(run: Run, name: str) -> None:
    """Evaluate the initial weights, or those of the newest checkpoint; eval/NAME.json says it was done."""
    if not run.config.evaluate.sets or (run.dir / "eval" / f"{name}.json").exists():
        return
    begin(run)
    step = 0
    if name != INITIAL:
        restored = run.checkpoints.restore({"params": abstract_like(nnx.state(run.model))})
        step, params = restored.step, restored.arrays["params"]
        run.engine.update_weights(params, step, run.probe(params))
    _evaluate(run, name, run.config.evaluate.num_samples, step)
    _account(run, _own_ledger(run))


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
    evaluations = _evaluations(run)
    if evaluations:
        show_table(
            "Accuracy on held-out questions",
            ("set", "questions", *evaluations),
            [
                (name, len(queries), *(_accuracy(scores, name) for scores in evaluations.values()))
                for name, queries in run.evaluation_sets.items()
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
                "total charged",
                "",
                "",
                format_flops(ledger.paper_flops),
                format_flops(ledger.itemised_flops),
            )
        ],
    )
    export = _newest_export(run)
    if export is not None:
        words = [sys.executable, "-m", "sgpo_jax.launch", "generate", str(export), "--raw", "--temperature", "0"]
        print(f"The trained model is in {export}. Try it:")
        print(f"  {shlex.join([*words, '--prompt', run.loaded.queries[0].prompt])}")


def _newest_export(run: Run) -> Path | None:
    """Of the last phase that was exported."""
    if not (run.dir / "metrics.jsonl").exists():
        return None
    phases = dict.fromkeys(row["phase"] for row in read_jsonl(run.dir / "metrics.jsonl", torn_tail=True))
    exported = [run.dir / "hf" / phase for phase in phases if (run.dir / "hf" / phase).is_dir()]
    return exported[-1] if exported else None


def _accuracy(scores: Mapping[str, Any], name: str) -> str:
    """avg@k with its 95% interval."""
    if name not in scores:
        return "-"
    avg = scores[name]["avg"]
    return f"{avg['mean']:.1%} ({avg['low']:.1%} to {avg['high']:.1%})" if avg else "unjudged"


def _evaluations(run: Run) -> dict[str, dict[str, Any]]:
    """What eval/*.json hold, by name: initial, the steps in order, final."""
    files = sorted((run.dir / "eval").glob("*.json"), key=lambda path: (path.stem == FINAL, path.stem != INITIAL, path))
    return {path.stem: read_json(path) for path in files}


def _profile_of(run: Run) -> profiling.Profile:
    source = Path(run.config.profile.reuse or run.dir)
    if not profiling.is_complete(source):
        raise UserError(f"{source}: has no complete profile; run `python -m sgpo_jax.launch profile` first")
    return profiling.read_profile(source, run.loaded.queries, run.profile_identity)


def _plan_of(run: Run) -> Plan:
    path = run.dir / "plan.json"
    plan = planning.read_plan(path)
    unknown = next((q for phase in plan.phases for q in phase.query_ids if q not in run.queries), None)
    if unknown:
        raise UserError(f"{path}: query {unknown} is not in data.train; plan again in a new run_dir")
    return plan


def _is_trained(run: Run) -> bool:
    return (run.dir / "checkpoints").is_dir() and bool(run.checkpoints.host().get("done"))


def _account(run: Run, own: Ledger) -> Ledger:
    """Write compute.json and return what it holds: the profile and all evaluations, as their own files say, and what
    training spent."""
    ledger = _ledger_of_files(run) + own
    write_json(run.dir / "compute.json", ledger.to_dict())
    return ledger


def _own_ledger(run: Run) -> Ledger:
    """What training itself had spent when compute.json was last written."""
    path, own = run.dir / "compute.json", Ledger(run.num_params)
    if not path.exists():
        return own
    try:
        written = Ledger.from_dict(read_json(path))
    except (KeyError, TypeError) as error:
        raise UserError(f"{path}: not a ledger ({error!r}); remove it") from None
    profiled = _ledger_of_files(run).tokens[Stage.PROFILING]
    for stage in (Stage.PROFILING, Stage.TRAINING, Stage.WASTED):
        own = own.add(stage, written.tokens[stage])
    # A second profile, made in training, is training's own; the first one is not.
    first = profiled if written.tokens[Stage.PROFILING].generated >= profiled.generated else TokenCounts()
    return replace(own, tokens={**own.tokens, Stage.PROFILING: own.tokens[Stage.PROFILING] - first})


def _ledger_of_files(run: Run) -> Ledger:
    ledger = Ledger(run.num_params)
    if run.is_profiled and profiling.is_complete(Path(run.config.profile.reuse or run.dir)):
        ledger = ledger.add(Stage.PROFILING, _profile_of(run).counts)
    for scores in _evaluations(run).values():
        for score in scores.values():
            ledger = ledger.add(Stage.EVALUATION, TokenCounts(**score["counts"]))
    return ledger
