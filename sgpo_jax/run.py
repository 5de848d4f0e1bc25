"""One run directory: its lock, its owner, and what its stages share."""

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
from filelock import FileLock, Timeout
from flax import nnx
from jax.sharding import Mesh

from sgpo_jax import profiling, strict_yaml
from sgpo_jax.checkpoints import Checkpoints
from sgpo_jax.config import Config, binding_differences, load_config, source_name
from sgpo_jax.data.queries import LoadedQueries, load_queries, overlap
from sgpo_jax.data.templates import PromptTemplate, load_tokenizer, stop_token_ids
from sgpo_jax.files import digest_files, read_json, sweep, write_text
from sgpo_jax.hosts.agreement import follow_run, lead_run
from sgpo_jax.hosts.messages import STOP, fail, has_failed, lead
from sgpo_jax.models.architecture import Architecture, read_architecture
from sgpo_jax.models.attention import choose_attention
from sgpo_jax.models.published import PUBLISHED
from sgpo_jax.models.qwen import Transformer
from sgpo_jax.models.safetensors import load_model, resolve_model_dir
from sgpo_jax.models.sharding import check_divisible, make_mesh, park, sampler_mesh
from sgpo_jax.models.weights import num_parameters
from sgpo_jax.rewards import VerifierPool
from sgpo_jax.rollouts.collect import Collector
from sgpo_jax.rollouts.engine import Engine, Probe
from sgpo_jax.rollouts.gpu_memory import release_unused
from sgpo_jax.rollouts.jax_engine import JaxEngine
from sgpo_jax.rollouts.placement import check_server, claim, num_gpus, place
from sgpo_jax.rollouts.probe import Prober
from sgpo_jax.rollouts.turns import OwnDevices, SharedDevices, Turns
from sgpo_jax.rollouts.vllm_engine import VLLMEngine, make_vllm_engine
from sgpo_jax.telemetry import check_trackers, say
from sgpo_jax.types import Query, UserError

INITIAL, FINAL = "initial", "final"  # names of the evaluations before and after training
MODEL_SUFFIXES = (".safetensors", ".json", ".jinja", ".txt", ".model")  # weights, configuration, tokenizer


class Run:
    """One run directory under its lock, and what its stages share, each part made when it is first needed."""

    def __init__(self, config: Config, mesh: Mesh | None, sampler_mesh: Mesh | None = None) -> None:
        """mesh: the trainer's, None on one device; sampler_mesh: of its devices, None where it is the trainer's."""
        self.config = config
        self.dir = Path(config.run_dir)
        self.mesh = mesh
        self.sampler_mesh = sampler_mesh

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
        lead("model")
        say(f"model: loading {self.model_dir} ({self.num_params / 1e6:.1f} M parameters)")
        model = self.config.model
        attention = choose_attention(model.attention, self.arch, model.compute_dtype)
        say(f"model: attention by {attention.implementation} ({attention.reason})")
        if self.sampler_mesh is not None:
            check_divisible(self.arch, self.sampler_mesh, key="rollouts.mesh")
        return load_model(
            self.model_dir,
            compute_dtype=model.compute_dtype,
            remat=model.remat,
            attention=attention.implementation,
            mesh=self.mesh,
        )

    @cached_property
    def params(self) -> nnx.State:
        """The initial weights, parked once there is an engine that shares the devices."""
        return nnx.state(self.model)

    @cached_property
    def engine(self) -> Engine:
        """With the initial weights."""
        stop_ids = stop_token_ids(self.model_dir, self.tokenizer)
        if self.config.rollouts.engine == "vllm":
            check_server(self.config.vllm, num_gpus(os.environ))
            probe = self.probe(self.params)
            if self.config.vllm.placement == "shared":
                self.params = park(self.params)  # the server takes its memory when it starts
                for gpu in release_unused():
                    say(f"vllm: GPU {gpu.number} has {gpu.free / 2**30:.1f} of {gpu.total / 2**30:.1f} GiB free for it")
            say("vllm: starting (a minute or two)")
            return make_vllm_engine(
                self.config,
                self.arch,
                self.model_dir,
                stop_ids=stop_ids,
                longest_prompt=self.longest_prompt,
                log=self.dir / "vllm.log",
                initial=self.params,
                probe=probe,
            )
        return self.jax_engine(stop_ids, self.longest_prompt)

    def jax_engine(self, stop_ids: Sequence[int], max_prompt_tokens: int) -> JaxEngine:
        model = self.model
        lead("engine", {"stop_ids": list(stop_ids), "max_prompt_tokens": max_prompt_tokens})
        return JaxEngine(
            model,
            stop_ids=stop_ids,
            max_prompt_tokens=max_prompt_tokens,
            config=self.config.rollouts,
            run_seed=self.config.seed,
            mesh=self.sampler_mesh,
        )

    @property
    def turns(self) -> Turns:
        """The engine and the trainer on their devices."""
        if self.config.vllm.placement == "shared" and isinstance(self.engine, VLLMEngine):
            return SharedDevices(self.engine)
        return OwnDevices()

    @cached_property
    def prober(self) -> Prober:
        prompts = [query.prompt_ids for query in self.loaded.queries[: self.config.vllm.probe_prompts]]
        end_id = min(stop_token_ids(self.model_dir, self.tokenizer))
        return Prober(self.model, prompts, end_id, chunk_tokens=self.config.model.vocab_chunk_tokens)

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
            if name == "checkpoints" and has_failed():
                continue  # what it would wait for is gone
            if name in self.__dict__:
                getattr(self, name).close()


@contextmanager
def open_run(config: Config) -> Iterator[Run]:
    """Lock the run directory for as long as the block lasts, and hold it to one configuration.

    Raises UserError: the directory cannot be written, is in use, or belongs to another configuration; the devices do
    not suffice.
    """
    config = place(config, num_gpus(os.environ))
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
        check_owner(config)
        sweep(run_dir)
        lead_run(config)
        with _on_devices(config) as run:
            yield run
    finally:
        lock.release()


@contextmanager
def join_run(config: Config) -> Iterator[Run]:
    """The run that process 0 opens, in a process that follows it: without its lock, and without a word.

    Raises UserError where configuration or directory are not those of process 0.
    """
    config = place(config, num_gpus(os.environ))
    follow_run(config)
    with _on_devices(config) as run:
        yield run


@contextmanager
def _on_devices(config: Config) -> Iterator[Run]:
    claim(config)
    arch = known_architecture(config.model.path)
    everything = make_mesh(config.mesh, arch=arch)
    sampler = sampler_mesh(config.rollouts.mesh, everything, arch=arch)
    mesh = everything if everything.size > 1 else None  # on one device there is nothing to lay out
    with nullcontext() if mesh is None else jax.set_mesh(mesh):
        run = Run(config, mesh, None if sampler == everything else sampler)
        try:
            yield run
        except BaseException as error:
            fail(error)  # before what was started is ended
            raise
        else:
            lead(STOP)
        finally:
            run.close()


def known_architecture(name: str) -> Architecture | None:
    """Of model.path where it is a directory or a model whose architecture is known here; nothing is fetched."""
    return read_architecture(Path(name)) if Path(name).is_dir() else PUBLISHED.get(name)


def config_of(run_dir: Path, overrides: Sequence[str] = ()) -> Config:
    """The configuration that a run directory was made with. Raises UserError where it is none."""
    path = run_dir / "config.yaml"
    if not path.exists():
        raise UserError(f"{run_dir}: not a run directory (it has no config.yaml)")
    return load_config(path, [f"run_dir={json.dumps(str(run_dir))}", *overrides])  # it may have been moved


def check_owner(config: Config) -> None:
    """A directory that holds results belongs to the settings that made them; without results it takes any.

    Raises UserError where these are others.
    """
    run_dir = Path(config.run_dir)
    path = run_dir / "config.yaml"
    if not path.exists():
        return
    try:
        binding = binding_differences(config_of(run_dir), config)
    except UserError:
        raise UserError(f"{path}: is there already, and is no run's configuration; name another run_dir") from None
    has_results = any(
        (run_dir / name).exists() for name in ("profile.jsonl", "plan.json", "eval", "metrics.jsonl", "checkpoints")
    )
    if has_results and binding:
        raise UserError(
            f"run_dir={run_dir}: belongs to another configuration ({'; '.join(binding)}); set these back, or name "
            f"another run_dir (its profile may serve there too: profile.reuse={run_dir})"
        )


def begin(run: Run) -> None:
    """From here on the directory belongs to this configuration; everything that it names has been found."""
    check_trackers(run.config.telemetry)
    check_positions(run.config, run.arch, run.longest_prompt)
    write_text(run.dir / "config.yaml", strict_yaml.dump(run.config))


def check_positions(config: Config, arch: Architecture, longest_prompt: int) -> None:
    """Raises UserError where prompts and completions can be longer than the model was made for."""
    max_completion = config.rollouts.max_completion_tokens
    if longest_prompt + max_completion > arch.max_positions:
        raise UserError(
            f"the longest prompt ({longest_prompt} tokens) with rollouts.max_completion_tokens={max_completion} is "
            f"longer than the model's {arch.max_positions} positions; lower that, or data.max_prompt_tokens"
        )


def profile_of(run: Run) -> profiling.Profile:
    source = Path(run.config.profile.reuse or run.dir)
    if not profiling.is_complete(source):
        raise UserError(f"{source}: has no complete profile; run `python -m sgpo_jax.launch profile` first")
    return profiling.read_profile(source, run.loaded.queries, run.profile_identity)


def read_evaluations(run: Run) -> dict[str, dict[str, Any]]:
    """What eval/*.json hold, by name: initial, the steps in order, final."""
    files = sorted((run.dir / "eval").glob("*.json"), key=lambda path: (path.stem == FINAL, path.stem != INITIAL, path))
    return {path.stem: read_json(path) for path in files}
