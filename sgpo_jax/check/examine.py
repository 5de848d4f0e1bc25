"""Everything that `check` finds out, in the process that has the simulated devices."""

import resource
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from sgpo_jax import comparison, profiling
from sgpo_jax.algorithms.allocation import prompts_of_step
from sgpo_jax.algorithms.compute import MeanLengths
from sgpo_jax.check.advice import Budget, advise
from sgpo_jax.check.machine import Machine, attention_of, devices_of, machine_of
from sgpo_jax.check.memory import Memory, Sizes, estimate
from sgpo_jax.check.preflight import Findings, preflight
from sgpo_jax.check.programs import Compiled, Inputs, compile_programs
from sgpo_jax.check.server import ServerMemory, server_memory
from sgpo_jax.config import Config
from sgpo_jax.data.batching import BatchShape, batch_shape
from sgpo_jax.hardware import GIB
from sgpo_jax.models.architecture import Architecture
from sgpo_jax.models.attention import Implementation
from sgpo_jax.models.sharding import fitting_layouts, make_mesh, sampler_mesh
from sgpo_jax.models.weights import num_parameters
from sgpo_jax.pipeline import profiled_workload
from sgpo_jax.run import Run
from sgpo_jax.telemetry import say
from sgpo_jax.types import UserError


@dataclass(frozen=True, slots=True)
class StepFlops:
    """A step of one group size: its rollouts, their tokens with prompts, the micro-batches that hold them at least."""

    group_size: int
    num_rollouts: int
    num_tokens: int
    num_micro_batches: int
    flops: int


@dataclass(frozen=True, slots=True)
class Peak:
    """Bytes of a device at the worst moment of a stage: by arithmetic, and as the programs were compiled."""

    estimated: int
    compiled: int


@dataclass(frozen=True, slots=True)
class Report:
    """sampler_mesh: the JAX engine's, where that is another. attention: what the programs were compiled with;
    machine_attention: what they will have on the machine.

    peaks: by stage, update and sample. is_exact: whether compiled for the machine's own devices. steps: see
    `step_flops`; mean_tokens is what they take a sequence to have. forecast: None without a histogram or a profile.
    """

    findings: Findings
    machine: Machine
    mesh: Mapping[str, int]
    sampler_mesh: Mapping[str, int] | None
    attention: Implementation
    machine_attention: Implementation
    shape: BatchShape
    num_params: int
    memory: Memory
    peaks: Mapping[str, Peak]
    programs: Mapping[str, Compiled]
    steps: tuple[StepFlops, ...]
    mean_tokens: float
    server: ServerMemory | None
    forecast: comparison.MethodForecast | None
    hours: comparison.Hours | None
    problems: tuple[str, ...]
    notes: tuple[str, ...]
    seconds: float
    peak_rss_bytes: int = field(default_factory=lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)

    @property
    def is_exact(self) -> bool:
        return self.machine.is_tpu

    @property
    def flops_over_6p(self) -> float:
        """Of the update of one micro-batch, by token slot."""
        slots = self.shape.num_rows * self.shape.row_length
        return self.programs["accumulate"].flops / (6 * self.num_params * slots)


def examine(config: Config, *, num_devices: int | None, allow_missing: bool) -> Report:
    """Raises UserError where nothing can be compiled: the architecture is not known, or the mesh is not possible."""
    begun = time.monotonic()
    say("check: looking at what the configuration names")
    findings = preflight(config)
    machine, arch = machine_of(config, num_devices), findings.arch
    if arch is None:
        raise UserError(
            "; ".join([*findings.problems, *findings.missing])
            + ": without the model's architecture nothing can be worked out; fetch the model, or its config.json"
        )
    lengths, forecast = _forecast(config, findings, num_parameters(arch))
    problems = [*findings.problems, *([] if allow_missing else map(_not_here, findings.missing))]
    mesh = make_mesh(config.mesh, devices_of(machine), arch=arch)
    sampler = sampler_mesh(config.rollouts.mesh, mesh, arch=arch)
    other = None if sampler == mesh else sampler
    sizes, inputs = shapes_of(
        config, machine, arch, mesh.shape, findings.longest_prompt, None if other is None else other.shape
    )
    say(f"check: compiling for {'TPUs' if machine.is_tpu else f'{mesh.size} simulated devices'}")
    # On one device a run has no mesh; but it is the mesh that says which TPU to compile for.
    programs = compile_programs(config, inputs, mesh if mesh.size > 1 or machine.is_tpu else None, other)
    memory = estimate(sizes)
    peaks = _peaks(memory, programs, config)
    server = server_memory(config, machine, arch, inputs.shape.row_length)
    fitting, notes = _fit(sizes, memory, peaks, programs, machine)
    served, served_notes = _serve(server, config)
    mean_tokens = lengths.prompt + lengths.training if lengths else float(inputs.shape.row_length)
    return Report(
        findings=findings,
        machine=machine,
        mesh=dict(mesh.shape),
        sampler_mesh=sizes.sampler_mesh,
        attention=inputs.attention,
        machine_attention=attention_of(config, machine),
        shape=inputs.shape,
        num_params=num_parameters(arch),
        memory=memory,
        peaks=peaks,
        programs=programs,
        steps=_steps(config, inputs.shape, mean_tokens, programs["accumulate"].flops),
        mean_tokens=mean_tokens,
        server=server,
        forecast=forecast,
        hours=comparison.hours(forecast.forecast.ledger, config) if forecast else None,
        problems=(*problems, *fitting, *served),
        notes=(*notes, *served_notes, *_gathered_for_each_token(programs, sizes, config, machine)),
        seconds=time.monotonic() - begun,
    )


def _not_here(line: str) -> str:
    return f"{line}; if this is not the machine of the run: --allow-missing"


def shapes_of(
    config: Config,
    machine: Machine,
    arch: Architecture,
    mesh: Mapping[str, int],
    longest_prompt: int,
    sampler: Mapping[str, int] | None = None,
) -> tuple[Sizes, Inputs]:
    """What arithmetic and programs follow from. mesh, sampler: sizes by axis, the sampler's where they are others."""
    sizes = dict(mesh)
    rollouts = config.rollouts
    shape = batch_shape(
        longest_prompt, rollouts.max_completion_tokens, config.train.micro_batch_tokens, sizes["data"] * sizes["fsdp"]
    )
    attention = attention_of(config, machine)
    inputs = Inputs(arch, shape, longest_prompt, attention if machine.is_tpu else "plain")
    return Sizes(
        arch=arch,
        **sizes,
        num_rows=shape.num_rows,
        row_length=shape.row_length,
        vocab_chunk_tokens=config.model.vocab_chunk_tokens,
        remat=config.model.remat,
        compute_bytes=2 if config.model.compute_dtype == "bfloat16" else 4,
        holds_scores=attention == "plain",
        has_reference=config.train.loss.kl_coef > 0,
        num_slots=rollouts.batch_size if rollouts.engine == "jax" else 0,
        slot_length=longest_prompt + rollouts.max_completion_tokens,
        sampler_mesh=None if sampler is None else dict(sampler),
    ), inputs


def _peaks(memory: Memory, programs: Mapping[str, Compiled], config: Config) -> dict[str, Peak]:
    """The programs' own bytes, and those of what rests beside their arguments."""
    beside = memory.reference + memory.sampler_weights
    update = max(programs["accumulate"].peak + memory.optimizer, programs["apply"].peak)
    if config.train.num_updates > 1 or config.train.loss.kl_coef:
        update = max(update, programs["logprobs"].peak + memory.optimizer)
    peaks = {"update": Peak(memory.updating, update + beside)}
    if "decode" in programs:
        rests = memory.optimizer + memory.reference
        sample = max(programs[name].peak for name in ("admit", "decode"))
        if memory.sampler_weights:
            sample += memory.weights
        if "decoding_params" in programs:
            sample = max(sample, programs["decoding_params"].peak)
        peaks["sample"] = Peak(memory.sampling, sample + rests)
    return peaks


def _fit(
    sizes: Sizes, memory: Memory, peaks: Mapping[str, Peak], programs: Mapping[str, Compiled], machine: Machine
) -> tuple[list[str], list[str]]:
    """Problems with the settings that would solve them, and notes."""
    room = machine.trainer_bytes
    if room is None:
        return [], ["no device is named (hardware.device), so there is no memory to hold this to"]
    failed = [f"{name}: {program.failure}" for name, program in programs.items() if program.failure]
    scale = 1.0
    if machine.is_tpu:
        worst = max(peak.compiled for peak in peaks.values())
        scale = max(1.0, programs["accumulate"].temporaries / memory.passing)
        if failed:  # how much too large is not known: a tenth at least
            scale = max(scale, 1.1 * (room - memory.always - memory.gradients) / memory.passing)
    else:
        worst = max(peak.estimated for peak in peaks.values())
    if not failed and worst <= room:
        upper = max(peak.compiled for peak in peaks.values())
        if upper <= room:
            return [], []
        return [], [
            f"the estimate fits in {_gib(room)}, but the programs as compiled for CPUs would take {_gib(upper)}, an "
            "upper estimate: try a step before a long run"
        ]
    advice = advise(sizes, Budget(room, scale))
    way_out = (
        f"{' '.join(advice.settings)} would make it {_gib(advice.num_bytes)}"
        if advice
        else "no setting makes it fit on such devices"
    )
    what = "; ".join(failed) or f"a device would hold {_gib(worst)}"
    return [f"does not fit: {what}; the trainer may take {_gib(room)} of one; {way_out}"], []


def _gathered_for_each_token(
    programs: Mapping[str, Compiled], sizes: Sizes, config: Config, machine: Machine
) -> list[str]:
    """A note where the JAX engine decodes from weights that are spread over the devices of the batch."""
    if "decode" not in programs:
        return []
    memory = estimate(sizes)
    sent = sum(c.num_bytes for c in programs["decode"].collectives if c.kind == "all-gather")
    of_one = sent / config.rollouts.decode_steps
    if of_one <= (memory.sampler_weights or memory.weights):
        return []
    return [
        f"the JAX engine gathers {_gib(of_one)} for every token that it decodes, nearly all of it weights; "
        f"{_layout_without_gathers(sizes, machine.trainer_bytes)}"
    ]


def _layout_without_gathers(sizes: Sizes, room: int | None) -> str:
    """The most copies of the weights that fit; where no memory is known, the fewest."""
    layouts = [layout for layout in fitting_layouts(sizes.num_devices, sizes.arch) if layout[1] == 1]
    for data, fsdp, tensor in layouts if room is None else reversed(layouts):
        memory = estimate(replace(sizes, sampler_mesh={"data": data, "fsdp": fsdp, "tensor": tensor}))
        if room is None or max(memory.updating, memory.sampling) <= room:
            return (
                f"with rollouts.mesh.data={data} rollouts.mesh.tensor={tensor} they would stay where they are, for "
                f"{_gib(memory.sampler_weights)} of them on each device"
            )
    return "the layouts of rollouts.mesh that gather none do not fit in the devices' memory"


def _serve(server: ServerMemory | None, config: Config) -> tuple[list[str], list[str]]:
    if server is None:
        return [], []
    if not server.num_sequences:
        split = 2 * config.vllm.tensor_parallel
        return [
            f"does not fit: a vLLM server's {_gib(server.weights)} of weights leave no room for a completion in "
            f"{_gib(server.budget)}; set vllm.tensor_parallel={split}, or raise vllm.memory_frac"
        ], []
    side_by_side = config.vllm.max_num_seqs * server.num_copies
    if server.num_sequences < side_by_side:
        return [], [
            f"the vLLM servers' caches hold {server.num_sequences} completions of full length, fewer than the "
            f"{side_by_side} that they may decode side by side: those that do not fit wait"
        ]
    return [], []


def _forecast(
    config: Config, findings: Findings, num_params: int
) -> tuple[MeanLengths | None, comparison.MethodForecast | None]:
    """Of the method, from the section forecast or the run's profile; neither without."""
    workload = None
    if config.forecast is not None:
        workload = comparison.workload_of(config.forecast, config.forecast.num_params or num_params)
    elif findings.queries and profiling.is_complete(Path(config.profile.reuse or config.run_dir)):
        with findings.finding():
            workload = profiled_workload(Run(config, mesh=None))
    if workload is None:
        return None, None
    return workload.lengths, comparison.forecast_method(config.train.method, workload, config)


def _steps(config: Config, shape: BatchShape, mean_tokens: float, flops: int) -> tuple[StepFlops, ...]:
    """One for each group size, with the work of as many micro-batches as their tokens fill."""
    steps = []
    for group_size in config.group_sizes():
        num_rollouts = group_size * prompts_of_step(config.train, group_size)
        num_tokens = round(num_rollouts * mean_tokens)
        num_micro_batches = -(-num_tokens // (shape.num_rows * shape.row_length))
        steps.append(StepFlops(group_size, num_rollouts, num_tokens, num_micro_batches, num_micro_batches * flops))
    return tuple(steps)


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.1f} GiB"
