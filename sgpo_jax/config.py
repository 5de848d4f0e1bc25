"""Every knob of the project: one strict, typed tree, read from a YAML file plus dotted overrides.

`load_config` is the only way in. Whatever is wrong ends in a UserError of one line (see strict_yaml.py).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from sgpo_jax import strict_yaml
from sgpo_jax.hardware import DEVICES
from sgpo_jax.strict_yaml import Section

Probability = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]


class ModelConfig(Section):
    path: str
    """A Hugging Face model directory, or a hub name that is in the local cache or can be fetched."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of activations and matrix products; the trainer's own weights are always float32."""
    remat: Literal["none", "dots", "full"] = "full"
    """What the backward pass recomputes: nothing, all but matrix products, or everything of a layer."""
    attention: Literal["auto", "plain", "cudnn", "tokamax", "splash"] = "auto"
    """What computes attention in training and prefill (docs/attention.md). auto: cudnn on GPUs, splash on TPUs, where
    they take the model's head size and compute_dtype, else plain; the log says which, and why. One that is named and
    cannot run is an error."""
    vocab_chunk_tokens: Count = 1024
    """Tokens whose logits are held at once when log-probabilities are computed."""


class SourceConfig(Section):
    path: str
    """A .jsonl, .json, .parquet or .csv file; a Hugging Face data set, by hub name or a local copy of it (`NAME:CONFIG`
    for one of its configurations); an evaluation set by name (see data/evaluation_sets.py), `NAME@PATH` to read it from
    a local copy; `module:function`, giving rows; or `reasoning_gym:TASK`."""
    name: str = ""
    """How reports call this source; empty: the last part of `path`."""
    split: str = "train"
    """Which split of a Hugging Face data set, or of a reasoning-gym task. An evaluation set by name has its own."""
    kind: Annotated[str, Field(pattern=r"^(auto|math|exact|choice|numeric|reasoning_gym|[\w.]+:\w+)$")] = "auto"
    """The verifier: math, exact, choice, numeric, reasoning_gym, or `module:function` of your own; auto: by the rows'
    format."""
    max_queries: Count | None = None
    """Keep this many queries, drawn with the run's seed; empty: all."""


class DataConfig(Section):
    train: Annotated[tuple[SourceConfig, ...], Field(min_length=1)]
    """Where the training questions come from."""
    template: Literal["chat", "qwen_math", "plain"] = "chat"
    """How a question becomes a prompt: the model's chat template, Qwen-Math's (reason step by step, answer in a box),
    or the question as it is."""
    system_prompt: str | None = None
    """The chat templates' system message; empty: none is given (a template may add its own)."""
    max_prompt_tokens: Count = 1024
    """Longer prompts are dropped and counted."""
    language: Literal["any", "english"] = "any"
    """Keep only questions in this language."""


class OverlongConfig(Section):
    """Soft penalty for long completions (DAPO, section 3.4): 0 up to max - cache, then linear to -1 at max."""

    max_tokens: Count
    cache_tokens: Count

    @model_validator(mode="after")
    def _check(self) -> "OverlongConfig":
        if self.cache_tokens > self.max_tokens:
            raise ValueError("cache_tokens must not exceed max_tokens")
        return self


class RewardsConfig(Section):
    correct: Finite = 1.0
    """Reward of a correct completion."""
    wrong: Finite = 0.0
    """Reward of a wrong completion."""
    correct_threshold: Probability = 1.0
    """Graded verifiers: a score of at least this counts as correct."""
    accept_stated_answer: bool = False
    """Also accept a final answer stated without a box (`The answer is 42.`)."""
    time_limit_s: Positive = 5.0
    """A judgement that takes longer is killed and counted as an error."""
    memory_limit_mb: Count = 2048
    """Memory of one worker; a judgement that needs more is an error."""
    num_workers: Count = 2
    """Processes that judge."""
    overlong: OverlongConfig | None = None
    """Overlong reward shaping; empty: off."""


class LayoutConfig(Section):
    """How many devices each axis of a mesh has; -1 (at most once): all that are left."""

    data: int = 1
    """Copies, each with its share of the sequences."""
    fsdp: int = 1
    """Devices over which weights are split that share the sequences: they gather what they compute with."""
    tensor: int = 1
    """Devices over which heads, the MLP and the vocabulary are split: what they compute with stays where it is."""

    @model_validator(mode="after")
    def _check(self) -> "LayoutConfig":
        sizes = (self.data, self.fsdp, self.tensor)
        if any(size == 0 or size < -1 for size in sizes) or sizes.count(-1) > 1:
            raise ValueError("each axis is a positive number or -1, and -1 stands at most once")
        return self


class SamplerMeshConfig(LayoutConfig):
    """The trainer's devices in another layout. Without sizes, each has a copy of the weights."""

    data: int = -1
    """As in `mesh`."""


class RolloutsConfig(Section):
    engine: Literal["jax", "vllm"] = "jax"
    """What samples completions: the trainer's own devices, or vLLM servers (section vllm)."""
    max_completion_tokens: Count = 3072
    """A completion that has not ended by then is cut (finish_reason length)."""
    temperature: Positive = 1.0
    """Sampling temperature of profiling and training; all log-probabilities are taken at it."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus of profiling and training. Below 1, training is biased: the probability ratio is against the whole
    distribution, which is not what was sampled from."""
    allow_biased_ratio: bool = False
    """Whether top_p may be below 1 all the same."""
    batch_size: Count = 64
    """Completions that the JAX engine decodes side by side."""
    prefill_tokens: Count = 512
    """Prompt tokens that the JAX engine reads in one call; longer prompts are read one at a time."""
    decode_steps: Count = 16
    """Tokens that the JAX engine decodes between two looks at what has finished."""
    mesh: SamplerMeshConfig | None = None
    """The layout that the JAX engine samples in, over the trainer's devices, such as {tensor: 2}; empty: the
    trainer's, where mesh.fsdp gathers all weights for every token. In another one it has a copy of the weights, in
    model.compute_dtype, made at each sync (docs/check.md)."""

    @model_validator(mode="after")
    def _check(self) -> "RolloutsConfig":
        if self.mesh is not None and self.engine != "jax":
            raise ValueError(
                f"mesh lays out the JAX engine; with engine={self.engine} leave it out, and see vllm.tensor_parallel "
                "and vllm.data_parallel"
            )
        if self.top_p < 1 and not self.allow_biased_ratio:
            raise ValueError("top_p below 1 biases the probability ratio; set allow_biased_ratio to accept that")
        return self


class VLLMConfig(Section):
    """The servers of rollouts.engine=vllm: one that the run starts and ends itself, or others that run already."""

    urls: tuple[Annotated[str, Field(pattern=r"^https?://[^/\s]+$")], ...] = ()
    """Servers that run already, such as http://127.0.0.1:8000; empty: start one. They must serve this model, in
    model.compute_dtype, with VLLM_SERVER_DEV_MODE=1, --generation-config vllm and --logprobs-mode processed_logprobs,
    and must be able to read weights_dir. Their key is read from the environment variable VLLM_API_KEY."""
    command: Annotated[tuple[str, ...], Field(min_length=1)] = (
        ".venv-vllm/bin/python",
        "-m",
        "vllm.entrypoints.openai.api_server",
    )
    """What starts a server, without its options; tools/setup_vllm.sh makes this one."""
    extra_args: tuple[str, ...] = ()
    """Further options of the server, after those of this section."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the server, beside this process's own."""
    platform: Literal["cuda", "cpu"] = "cuda"
    """What the server runs on. For vLLM on TPUs, start it yourself and name it in `urls`."""
    host: Annotated[str, Field(pattern=r"^[\w.-]+$")] = "127.0.0.1"
    """Address at which a server that the run starts listens and is reached: of several hosts each its own. Beyond
    loopback, and with several hosts, the key is that in the environment variable VLLM_API_KEY."""
    port: Annotated[int, Field(ge=1, lt=65536)] | None = None
    """Port of that server; empty: a free one."""
    placement: Literal["split", "shared"] = "split"
    """How a server that the run starts and the trainer divide the GPUs of this machine: each has its own, or both have
    the same, and the server sleeps while the trainer updates (see docs/vllm.md)."""
    devices: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """GPUs of the server, by their numbers among those that this process sees; empty: with placement=split all that
    mesh.devices leaves, or the last half; with shared the trainer's."""
    memory_frac: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of a GPU's memory that the server takes, with placement=shared while it is awake, and at most 0.95; empty:
    vLLM's own default."""
    kv_cache_gib: Count = 1
    """Memory of the key-value cache on CPUs, in GiB."""
    tensor_parallel: Count = 1
    """GPUs over which each copy of the model is split."""
    data_parallel: Count | None = None
    """Copies of the model inside the server; empty: as many as its GPUs hold."""
    max_num_seqs: Count = 128
    """Completions that the server decodes side by side."""
    max_batched_tokens: Count = 16384
    """Tokens of one step of the server; at least the longest prompt with its completion is taken."""
    max_in_flight: Count = 512
    """Completions asked for at a time, over all servers: more than they decode, so that none waits for work."""
    max_attempts: Count = 4
    """Attempts at one request before its completions count as errors."""
    max_failures: Count = 3
    """Failures in a row (of syncs, or of the server without a completion between) that end the run."""
    start_time_limit_s: Positive = 900.0
    """A server that is not healthy by then has failed."""
    request_time_limit_s: Positive = 3600.0
    """A server that has not answered a request by then hangs, and is started again: waiting and decoding included."""
    sync_time_limit_s: Positive = 300.0
    """Longest exchange of weights, and longest answer to a probe."""
    weights_dir: str | None = None
    """Directory in which weights are passed on, shared with the servers of urls; empty: /dev/shm, or the system's
    directory for temporary files where there is none."""
    probe_prompts: Count = 4
    """Training prompts whose log-probabilities are compared with the trainer's after each sync."""
    probe_max_gap: Positive | None = None
    """Largest difference of a log-probability that a sync may leave; empty: 1e-4 in float32, 2 in bfloat16."""
    probe_mean_gap: Positive | None = None
    """Largest mean of these differences; empty: 1e-4 in float32, 0.1 in bfloat16."""


class ProfileConfig(Section):
    """The offline profile (sGPO, section 4.1)."""

    num_samples: Count = 8
    """Completions for each query, N."""
    stages: tuple[Count, ...] = ()
    """Sequential profiling: numbers of completions, increasing and below num_samples, after each of which a query whose
    bucket is certain enough gets no more; empty: every query gets num_samples. Of no paper, see
    algorithms/sequential.py."""
    certainty: Annotated[float, Field(gt=0, le=1)] = 0.65
    """What is certain enough: the probability that the bucket would be the same after num_samples. By the default, with
    the buckets of section sgpo and stages [2, 4], 1 of 2, and 2, 3 or 4 of 4 are enough."""
    reuse: str | None = None
    """A run directory whose complete profile serves this run too; empty: profile anew."""

    @model_validator(mode="after")
    def _check(self) -> "ProfileConfig":
        looks = [*self.stages, self.num_samples]
        if looks != sorted(set(looks)):
            raise ValueError(f"stages must increase strictly and stay below num_samples={self.num_samples}")
        return self


class SGPOConfig(Section):
    """What sGPO makes of the profile (sGPO, sections 4.2 and 4.3)."""

    max_success_rate: Probability = 0.75
    """A query above it is trivial and dropped."""
    group_sizes: tuple[Annotated[int, Field(ge=2)], ...] = (2, 4, 8)
    """Group sizes in the order of the curriculum, each a bucket of queries."""
    rounding: Literal["floor", "ceil"] = "floor"
    """How 1 / success rate becomes a group size."""
    unsolved_frac: Probability = 0.10
    """Share of the unsolved queries mixed into each phase, alpha."""
    unsolved_subset: Literal["fixed", "per_epoch"] = "fixed"
    """Whether a phase's unsolved queries are drawn once or anew in each epoch."""
    curriculum: bool = True
    """Whether phases follow each other, easy to hard; else an epoch's queries are shuffled together, each with its own
    group size. (Uniform group sizes are group_sizes=[8]; no filter is max_success_rate=1 and unsolved_frac=1.)"""
    unsolved_from_epoch: Count = 1
    """The first epoch into which unsolved queries are mixed (the paper: 1)."""
    later_epochs: Literal["stale", "reprofiled", "posterior"] = "stale"
    """Whether later epochs go by the first profile; or each by a new one, made by the policy of that moment and charged
    as profiling; or by what the profile and all of training so far say together, nothing dropped (of no paper, see
    algorithms/posterior.py)."""
    later_group_sizes: tuple[Annotated[int, Field(ge=2)], ...] = ()
    """Of later_epochs=posterior: its group sizes; empty: group_sizes."""
    later_unsolved_frac: Probability = 1.0
    """Of later_epochs=posterior: share of the queries still never solved that an epoch trains, drawn anew for each."""
    drop_trivial_later: Probability | None = None
    """Of later_epochs=posterior: leave out queries whose success rate is above max_success_rate with at least this
    probability, such as 0.95; empty: none."""

    @model_validator(mode="after")
    def _check(self) -> "SGPOConfig":
        if not self.group_sizes or list(self.group_sizes) != sorted(set(self.group_sizes)):
            raise ValueError("group_sizes must increase strictly, such as [2, 4, 8]")
        if list(self.later_group_sizes) != sorted(set(self.later_group_sizes)):
            raise ValueError("later_group_sizes must increase strictly, such as [4, 8]")
        of_posterior = self.later_group_sizes, self.later_unsolved_frac, self.drop_trivial_later
        if self.later_epochs != "posterior" and of_posterior != ((), 1.0, None):
            raise ValueError(
                "later_group_sizes, later_unsolved_frac and drop_trivial_later belong to later_epochs=posterior"
            )
        return self


class RefillConfig(Section):
    """Rounds of rollouts until a step has enough informative groups, for train.method dapo, greso and just_in_time."""

    max_rounds: Count = 20
    """Rounds of one step."""
    when_short: Literal["error", "train"] = "error"
    """After max_rounds: end with an error that says the share of informative groups, or train on those there are."""


class DAPOConfig(Section):
    """Uniform groups with dynamic sampling (DAPO, section 3.2)."""

    group_size: Annotated[int, Field(ge=2)] = 8
    """Rollouts of each query."""
    oversample: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.0
    """Queries rolled out for each group that is still missing: more means fewer rounds, and more that is dropped."""


class GRESOConfig(Section):
    """Dynamic sampling that skips queries before rollout (GRESO, arXiv 2506.02177)."""

    group_size: Annotated[int, Field(ge=2)] = 8
    """Rollouts of each query."""


class KnapsackConfig(Section):
    """Group sizes by success rate under a budget (Knapsack RL, arXiv 2509.25849)."""

    mean_group_size: Annotated[int, Field(ge=2, le=128)] = 8
    """Mean rollouts of a step's queries, and the group size of the first epoch."""


class JustInTimeConfig(Section):
    """Chunks of queries are profiled by the current policy, and what is informative is trained on at once: of no paper,
    see schedulers/just_in_time.py."""

    chunk_queries: Count = 90
    """Queries profiled together. Large chunks fill the sampler; their groups are trained on up to chunk_queries /
    prompts_per_step steps later."""
    num_samples: Annotated[int, Field(ge=2)] = 2
    """Completions of each query in its profile."""
    group_size: Annotated[int, Field(ge=2)] = 2
    """Rollouts of each trained query: those of its profile, and fresh ones up to this number."""

    @model_validator(mode="after")
    def _check(self) -> "JustInTimeConfig":
        if self.group_size < self.num_samples:
            raise ValueError(f"group_size={self.group_size} must be at least num_samples={self.num_samples}")
        return self


_CLIP_RANGES = {"grpo": (0.2, 0.2), "dr_grpo": (0.2, 0.2), "rloo": (0.2, 0.2), "gspo": (3e-4, 4e-4)}


class LossConfig(Section):
    """The objective; by default DAPO's (arXiv 2503.14476, section 3; sGPO, section 4.4)."""

    objective: Literal["dapo", "grpo", "dr_grpo", "rloo", "gspo", "cispo"] = "dapo"
    """Which advantage, ratio and mean over tokens; see algorithms/objectives.py."""
    clip_low: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Lower clip range of the probability ratio; empty: the objective's (cispo has none). For gspo, of a sequence's."""
    clip_high: Positive = 0.28
    """Upper clip range of the probability ratio; empty: the objective's."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Upper bound of the ratio where the advantage is negative; empty: off."""
    entropy_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the mean token entropy in the objective."""
    old_logprobs: Literal["trainer", "sampler"] = "trainer"
    """Whose log-probabilities the ratio is against: the trainer's before the first update on a step's groups, or those
    that the sampler reported, which is right for groups that older weights sampled (mismatch/* are then 0, and
    train/ratio holds what separates the two). Empty: sampler for train.method=just_in_time, else trainer."""
    sampler_weight_cap: Positive | None = None
    """Truncated importance weight min(pi_old / pi_sampler, cap); empty: off."""
    advantage_ddof: Literal[0, 1] = 0
    """Population (0) or sample (1) standard deviation of a group's rewards."""
    kl_coef: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Weight of the KL divergence from the initial weights; above 0, a second copy of them is held."""
    kl_kind: Literal["k1", "k2", "k3"] = "k3"
    """Its estimate: k2 and k3 as a part of the loss, k1 taken off the rewards."""
    skip_uninformative: bool = False
    """Whether groups without advantage are left out of the update's passes, which changes no gradient."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in_clip_ranges(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        low, high = _CLIP_RANGES.get(str(values.get("objective")), (0.2, 0.28))
        return {"clip_low": low, "clip_high": high, **values}

    @model_validator(mode="after")
    def _check(self) -> "LossConfig":
        if self.skip_uninformative and (self.kl_coef or self.entropy_coef):
            raise ValueError(
                "skip_uninformative with kl_coef or entropy_coef above 0 would change the gradient: groups without "
                "advantage have one then"
            )
        if self.objective in ("dr_grpo", "rloo") and self.advantage_ddof:
            raise ValueError(f"objective={self.objective} divides by no deviation: advantage_ddof must be 0")
        if self.old_logprobs == "sampler" and self.sampler_weight_cap is not None:
            raise ValueError("old_logprobs=sampler has no mismatch to weigh: sampler_weight_cap must be empty")
        if self.objective == "cispo" and self.dual_clip is not None:
            raise ValueError("objective=cispo has no dual_clip")
        return self


class OptimizerConfig(Section):
    """AdamW with global-norm clipping and a warm-up (sGPO, appendix)."""

    learning_rate: Positive = 1e-6
    schedule: Literal["constant", "linear"] = "constant"
    """Beside the warm-up: constant, or falling to final_frac of it with the share of the schedule that is over."""
    final_frac: Probability = 0.1
    """Where the linear schedule ends, as a share of learning_rate."""
    warmup_steps: Annotated[int, Field(ge=0)] = 10
    """Updates over which the rate rises from 0."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    eps: Positive = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """On matrices only."""
    clip_norm: Positive = 1.0
    """Bound of the gradient's global norm."""


class TrainConfig(Section):
    method: Literal["sgpo", "dapo", "greso", "knapsack", "just_in_time"] = "sgpo"
    """Which queries are rolled out, how often, in which order; each method has a section of its name. Only sgpo needs a
    profile."""
    epochs: Count = 2
    """Passes over the queries."""
    prompts_per_step: Count = 64
    """Queries of one step; each brings its group of rollouts."""
    rollouts_per_step: Count | None = None
    """Rollouts of one step, in place of prompts_per_step: a step has that many over the group size of queries, or over
    the mean group size where it mixes several. Empty: prompts_per_step."""
    num_updates: Count = 1
    """Optimizer updates on one batch of rollouts."""
    micro_batch_tokens: Count = 16384
    """Token slots of the compiled micro-batch, whose rows are packed; at least one row, of the longest sequence."""
    optimizer: OptimizerConfig = OptimizerConfig()
    loss: LossConfig = LossConfig()
    max_nonfinite_steps: Count = 3
    """Steps in a row with non-finite gradients that end the run with an error."""
    checkpoint_every: Count = 20
    """Steps between checkpoints; the end of a phase always makes one."""
    keep_checkpoints: Count = 2
    """Newest checkpoints that are kept."""
    export_phases: bool = True
    """Whether the end of each phase is exported to hf/."""
    sample_rollouts: Annotated[int, Field(ge=0)] = 8
    """Rollouts of each step saved under rollouts/ for reading."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in_old_logprobs(cls, values: Any) -> Any:
        if not isinstance(values, dict) or values.get("method") != "just_in_time":
            return values
        loss = values.get("loss", {})
        return {**values, "loss": {"old_logprobs": "sampler", **loss} if isinstance(loss, dict) else loss}

    @model_validator(mode="after")
    def _check(self) -> "TrainConfig":
        if self.method == "just_in_time" and self.loss.old_logprobs == "trainer":
            raise ValueError("method=just_in_time trains what older weights sampled: loss.old_logprobs must be sampler")
        return self


class EvaluateConfig(Section):
    """avg@k, pass@k and maj@k on held-out questions (sGPO, section 5). Charged to no ledger."""

    sets: tuple[SourceConfig, ...] = ()
    """Where the questions come from."""
    num_samples: Count = 16
    """Completions of each question, k."""
    temperature: Annotated[float, Field(ge=0)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 0.7
    every: Annotated[int, Field(ge=0)] = 0
    """Steps between evaluations during training; 0: only before and after training, and see `times`."""
    times: Annotated[int, Field(ge=0)] = 0
    """Evaluations during training, spread evenly over the schedule, so that methods whose steps differ in number and
    size are looked at equally often."""
    num_samples_during: Count = 4
    """Completions of each question in the evaluations during training."""

    @model_validator(mode="after")
    def _check(self) -> "EvaluateConfig":
        if self.every and self.times:
            raise ValueError(f"every={self.every} and times={self.times} both say when; set one of them")
        return self


class ExportConfig(Section):
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Type of the exported weights."""
    max_shard_mb: Count = 5000
    """Largest safetensors file; more becomes several with an index."""


class MeshConfig(LayoutConfig):
    """The trainer's devices, and how many of them each axis of the mesh has; -1 (at most once): all that are left."""

    fsdp: int = -1
    """Devices over which weights, their gradients and the optimizer's state are split; they share the sequences."""
    devices: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """GPUs of the trainer, by their numbers among those that this process sees; empty: all that vllm.placement leaves
    to it, and none with JAX_PLATFORMS=cpu."""
    memory_frac: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of a GPU's memory that JAX takes when it starts, and keeps; empty: JAX's own default. Not for
    vllm.placement=shared, where JAX takes what it needs and gives it back."""


class HostsConfig(Section):
    """Processes that make one run together, one a host as a rule, started by the same command (docs/hosts.md)."""

    num_processes: Count | None = 1
    """How many; empty: as many as the cluster's environment says (Slurm, Kubernetes, TPU)."""
    process_id: Annotated[int, Field(ge=0)] | None = None
    """Which of them this one is, process 0 leads; empty: what the cluster's environment says."""
    coordinator: Annotated[str, Field(pattern=r"^\S+:\d+$")] | None = None
    """Address and port of process 0 for the others; empty: what the cluster's environment says."""
    bind: Annotated[str, Field(pattern=r"^\S+:\d+$")] | None = None
    """Address and port that process 0 listens at, such as 0.0.0.0:8476 for every interface; empty: those of
    `coordinator`, only where that is a loopback address. The port has no key: it belongs into a network that only the
    job's hosts reach."""
    timeout_s: Count = 60
    """A process that was not heard of for so long is lost, and the others end."""
    start_timeout_s: Count = 300
    """Longest wait until all processes have started."""

    @model_validator(mode="after")
    def _check(self) -> "HostsConfig":
        if self.num_processes == 1 and (self.process_id, self.coordinator, self.bind) != (None, None, None):
            raise ValueError("num_processes=1 is a run without others: set it, or leave the other keys out")
        if self.num_processes is not None and (self.process_id or 0) >= self.num_processes:
            raise ValueError(f"process_id={self.process_id} must be below num_processes={self.num_processes}")
        return self


class TelemetryConfig(Section):
    trackers: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Where metrics go beside metrics.jsonl; each needs the extra of its name."""
    project: str = "sgpo_jax"
    """The project's name at the trackers."""


class ForecastConfig(Section):
    """A profile that was not made, for `plan --compare`: its histogram and mean lengths."""

    counts: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=2)]
    """Number of queries by correct answers, from 0 to profile.num_samples."""
    profiling_tokens: Positive
    """Mean tokens of a completion in profiling."""
    training_tokens: Positive
    """Mean tokens of a completion in training, for every method and group size."""
    prompt_tokens: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Mean tokens of a prompt."""
    num_params: Count | None = None
    """Parameters; empty: those of model.path."""


class HardwareConfig(Section):
    """The machines of the run: what `check` compiles for and holds memory to, and forecasts make hours of."""

    device: str | None = None
    """What they compute with, one of those in hardware.py, such as h100-80gb or tpu-v5p; empty: what flops_per_s says,
    and no memory to hold anything to."""
    num_hosts: Count = 1
    """Machines of the run."""
    devices_per_host: Count | None = None
    """Devices of each machine, those of vLLM servers that the run starts included."""
    flops_per_s: Positive | None = None
    """Peak of all devices of all machines together, in the type that is computed in; empty: theirs in bfloat16."""
    mfu_train: Annotated[float, Field(gt=0, le=1)] = 0.35
    """Share of the peak that updates and log-probability passes reach; the default is assumed, not measured."""
    mfu_generate: Annotated[float, Field(gt=0, le=1)] = 0.05
    """Share of the peak that sampling reaches; the default is assumed, not measured."""

    @model_validator(mode="after")
    def _check(self) -> "HardwareConfig":
        if self.device is not None and self.device not in DEVICES:
            raise ValueError(f"device={self.device} is not known; known are {', '.join(DEVICES)}")
        if (self.device is None) != (self.devices_per_host is None):
            raise ValueError("device and devices_per_host belong together: set both or neither")
        if self.device is None and self.flops_per_s is None:
            raise ValueError("needs device and devices_per_host, or flops_per_s")
        return self


class Config(Section):
    run_dir: Annotated[str, Field(min_length=1)]
    """Where everything of this run is written."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Decides every random choice of the run."""
    model: ModelConfig
    data: DataConfig
    rewards: RewardsConfig = RewardsConfig()
    rollouts: RolloutsConfig = RolloutsConfig()
    vllm: VLLMConfig = VLLMConfig()
    profile: ProfileConfig = ProfileConfig()
    sgpo: SGPOConfig = SGPOConfig()
    dapo: DAPOConfig = DAPOConfig()
    greso: GRESOConfig = GRESOConfig()
    knapsack: KnapsackConfig = KnapsackConfig()
    just_in_time: JustInTimeConfig = JustInTimeConfig()
    refill: RefillConfig = RefillConfig()
    forecast: ForecastConfig | None = None
    """A histogram for `plan --compare`; empty: it takes the run's profile."""
    hardware: HardwareConfig | None = None
    """The machines of the run; empty: `check` compiles for the devices of `mesh`, and there are no hours."""
    train: TrainConfig = TrainConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    export: ExportConfig = ExportConfig()
    mesh: MeshConfig = MeshConfig()
    hosts: HostsConfig = HostsConfig()
    telemetry: TelemetryConfig = TelemetryConfig()

    @model_validator(mode="after")
    def _check(self) -> "Config":
        overlong = self.rewards.overlong
        if overlong and overlong.max_tokens > self.rollouts.max_completion_tokens:
            raise ValueError(
                f"rewards.overlong.max_tokens={overlong.max_tokens} must not exceed "
                f"rollouts.max_completion_tokens={self.rollouts.max_completion_tokens}"
            )
        if self.forecast and len(self.forecast.counts) != self.profile.num_samples + 1:
            raise ValueError(
                f"forecast.counts has {len(self.forecast.counts)} numbers; with profile.num_samples="
                f"{self.profile.num_samples} it needs one for each of 0 to {self.profile.num_samples} correct answers"
            )
        if self.profile.stages and self.sgpo.later_epochs == "reprofiled":
            raise ValueError("sgpo.later_epochs=reprofiled samples every query alike: profile.stages must be empty")
        if self.rewards.correct <= self.rewards.wrong:
            raise ValueError(f"rewards.correct={self.rewards.correct} must exceed rewards.wrong={self.rewards.wrong}")
        for key, temperature in (("rollouts", self.rollouts.temperature), ("evaluate", self.evaluate.temperature)):
            if self.rollouts.engine == "vllm" and 0 < temperature < 0.01:
                raise ValueError(f"{key}.temperature={temperature}: vLLM would sample at 0.01; allowed is 0.01 or more")
        if self.vllm.placement == "shared" and self.hosts.num_processes != 1:
            raise ValueError("vllm.placement=shared is for one host; with hosts.num_processes, set split")
        names = [source_name(source) for source in self.evaluate.sets]
        if len(set(names)) < len(names):
            raise ValueError(f"evaluate.sets have the names {names}: give each a `name` of its own")
        per_step, largest = self.train.rollouts_per_step, max(self.group_sizes())
        if per_step is not None and per_step < largest:
            raise ValueError(f"train.rollouts_per_step={per_step} must be at least the group size {largest}")
        if self.train.num_updates > (per_step // largest if per_step else self.train.prompts_per_step):
            raise ValueError("train.num_updates must not exceed the queries of a step (train.prompts_per_step)")
        return self

    def group_sizes(self) -> tuple[int, ...]:
        """Of the method's steps, in the mean where one mixes several."""
        match self.train.method:
            case "dapo":
                return (self.dapo.group_size,)
            case "greso":
                return (self.greso.group_size,)
            case "knapsack":
                return (self.knapsack.mean_group_size,)
            case "just_in_time":
                return (self.just_in_time.group_size,)
        return (*self.sgpo.group_sizes, *self.sgpo.later_group_sizes)


MAY_CHANGE = (
    "run_dir",
    "telemetry.",
    "forecast",
    "hardware",
    "export.",
    "mesh.",
    "hosts.",
    "vllm.",
    "rewards.num_workers",
    "model.remat",
    "model.attention",
    "model.vocab_chunk_tokens",
    "rollouts.batch_size",
    "rollouts.prefill_tokens",
    "rollouts.decode_steps",
    "rollouts.mesh",
    "train.micro_batch_tokens",
    "train.checkpoint_every",
    "train.keep_checkpoints",
    "train.sample_rollouts",
)
"""Keys (or their beginnings) that may change between the starts of one run: they say how it is computed, not what."""


def binding_differences(old: Config, new: Config) -> list[str]:
    """What keeps a run of the one from being a run of the other, each as `key: old -> new`."""
    return [text for key, text in strict_yaml.differences(old, new).items() if not key.startswith(MAY_CHANGE)]


def binding_settings(config: Config) -> dict[str, Any]:
    """By dotted key, what a run's results depend on."""
    return {key: value for key, value in strict_yaml.flat(config).items() if not key.startswith(MAY_CHANGE)}


def source_name(source: SourceConfig) -> str:
    """How reports and file names call a source."""
    place = source.path.split("@")[0].rstrip("/")
    return source.name or Path(place).stem.replace(":", "-")


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a YAML file, apply `key.sub=value` overrides, validate. Raises UserError."""
    return strict_yaml.load(Config, path, overrides)


def parse_config(tree: dict[str, Any], where: str) -> Config:
    """Validate a tree of plain values; `where` says in errors where it came from. Raises UserError."""
    return strict_yaml.parse(Config, tree, where)
