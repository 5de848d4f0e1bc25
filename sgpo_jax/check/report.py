"""What `check` prints: JSON with stable keys, or a report for a person."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from sgpo_jax.algorithms.compute import CHARGED
from sgpo_jax.check.examine import Report
from sgpo_jax.hardware import GIB
from sgpo_jax.telemetry import format_flops, show_table

_MEANING = {
    "weights": "the trainer's, float32",
    "optimizer": "AdamW's two moments, float32",
    "gradients": "summed over micro-batches, float32",
    "micro_gradients": "of one micro-batch, float32",
    "cast_weights": "the trainer's weights in the compute type",
    "activations": "kept for the backward pass",
    "layer": "one layer's backward pass, its weights gathered",
    "logits": "of one chunk, with the matrix that makes them",
    "reference": "of the KL term",
    "sampler_weights": "the JAX engine's copy, in its layout and the compute type",
    "relayout": "a layer on its way to the JAX engine's layout",
    "kv_cache": "of the JAX engine, while it samples",
    "decoding": "of the JAX engine, while it samples",
}
_PASSING = ("micro_gradients", "cast_weights", "activations", "layer", "logits", "relayout", "decoding")


def to_dict(report: Report) -> dict[str, Any]:
    """JSON values. Bytes are of one device, FLOPs of all devices together, hours by the clock."""
    machine, findings = report.machine, report.findings
    return {
        "ok": not report.problems,
        "problems": list(report.problems),
        "notes": list(report.notes),
        "checked": findings.checked,
        "missing": findings.missing,
        "not_checked": findings.not_checked,
        "machine": {
            "device": machine.name,
            "num_hosts": machine.num_hosts,
            "trainer_devices": machine.trainer_devices,
            "server_devices": machine.server_devices,
            "device_bytes": machine.device.memory_bytes if machine.device else None,
            "trainer_bytes": machine.trainer_bytes,
            "mesh": dict(report.mesh),
            "sampler_mesh": None if report.sampler_mesh is None else dict(report.sampler_mesh),
            "attention": report.machine_attention,
            "compiled_attention": report.attention,
            "compiled_for": "tpu" if report.is_exact else "cpu",
        },
        "micro_batch": {"num_rows": report.shape.num_rows, "row_length": report.shape.row_length},
        "memory": {
            "by_kind": report.memory.to_dict(),
            "peaks": {name: asdict(peak) for name, peak in report.peaks.items()},
            "server": asdict(report.server) if report.server else None,
        },
        "programs": {
            name: {
                "seconds": program.seconds,
                "flops": program.flops,
                "arguments": program.arguments,
                "results": program.results,
                "aliased": program.aliased,
                "temporaries": program.temporaries,
                "failure": program.failure or None,
                "collectives": [asdict(collective) for collective in program.collectives],
            }
            for name, program in report.programs.items()
        },
        "flops": {
            "num_params": report.num_params,
            "micro_batch": report.programs["accumulate"].flops,
            "over_6p": report.flops_over_6p,
            "mean_tokens": report.mean_tokens,
            "steps": [asdict(step) for step in report.steps],
        },
        "forecast": _forecast(report),
        "seconds": report.seconds,
        "peak_rss_bytes": report.peak_rss_bytes,
    }


def _forecast(report: Report) -> dict[str, Any] | None:
    if report.forecast is None:
        return None
    ledger = report.forecast.forecast.ledger
    return {
        "method": report.forecast.name,
        "how": report.forecast.how,
        "num_steps": report.forecast.forecast.num_steps,
        "generated_tokens": sum(ledger.tokens[stage].generated for stage in CHARGED),
        "trained_tokens": sum(ledger.tokens[stage].trained for stage in CHARGED),
        "paper_flops": ledger.paper_flops,
        "itemised_flops": ledger.itemised_flops,
        "hours": {**asdict(report.hours), "total": report.hours.total} if report.hours else None,
    }


def show(report: Report) -> None:
    """On standard output."""
    _show_lines("Checked", report.findings.checked)
    _show_lines("Not checked", report.findings.not_checked)
    _show_machine(report)
    _show_memory(report)
    _show_programs(report)
    _show_flops(report)
    _show_forecast(report)
    _show_lines("Notes", report.notes)
    _show_lines("Problems", report.problems)
    print(f"\ncheck: {_verdict(report)} ({report.seconds:.0f} s and {_size(report.peak_rss_bytes)} of memory here)")


def _verdict(report: Report) -> str:
    if report.problems:
        return f"{len(report.problems)} problem{'s' * (len(report.problems) > 1)}"
    return "ready" if not report.findings.missing else "ready, as far as could be checked here"


def _show_lines(title: str, lines: Sequence[str]) -> None:
    if lines:
        print(f"\n{title}")
        for line in lines:
            print(f"  {line}")


def _show_machine(report: Report) -> None:
    machine, shape = report.machine, report.shape
    mesh = _sizes(report.mesh)
    sampler = f"; it samples in another layout ({_sizes(report.sampler_mesh)})" if report.sampler_mesh else ""
    hosts = f"{machine.num_hosts} host{'s' * (machine.num_hosts > 1)}"
    servers = f", vLLM on {machine.server_devices}" if machine.server_devices else ""
    compiled = "the machine's own TPUs" if report.is_exact else "simulated CPU devices"
    _show_lines(
        "Machine",
        [
            f"{hosts}, {machine.name or 'no device named'}: the trainer on {machine.trainer_devices} ({mesh})"
            f"{sampler}{servers}",
            f"micro-batch: {shape.num_rows} rows of {shape.row_length} tokens",
            f"attention: {report.machine_attention} there; compiled here for {compiled}, with {report.attention}",
        ],
    )
    print()


def _sizes(mesh: Mapping[str, int]) -> str:
    return " ".join(f"{axis}={size}" for axis, size in mesh.items())


def _show_memory(report: Report) -> None:
    kinds = [(name, size) for name, size in report.memory.to_dict().items() if size]
    show_table(
        "Memory of one device, by arithmetic",
        ("kind", "bytes", "", ""),
        [(name, _size(size), "about" if name in _PASSING else "", _MEANING[name]) for name, size in kinds],
    )
    room = report.machine.trainer_bytes
    show_table(
        "Memory of one device at the worst moment",
        ("stage", "by arithmetic", f"as compiled{'' if report.is_exact else ' (upper estimate)'}", "it may take"),
        [
            (name, _size(peak.estimated), _size(peak.compiled), _size(room) if room else "-")
            for name, peak in report.peaks.items()
        ],
    )
    if server := report.server:
        print(
            f"A vLLM server's GPU: {_size(server.weights)} of weights, about {_size(server.kv_cache)} of cache, within "
            f"{_size(server.budget)};\n{server.num_sequences} completions of full length side by side on all of them\n"
        )


def _show_programs(report: Report) -> None:
    upper = "" if report.is_exact else " (temporaries of a CPU: an upper estimate)"
    show_table(
        f"Programs: bytes of one device{upper}, FLOPs of all together, seconds of compiling",
        ("program", "arguments", "results", "temporaries", "FLOPs", "s"),
        [
            (
                name,
                *map(_size, (p.arguments, p.results - p.aliased, p.temporaries)),
                format_flops(p.flops).removesuffix("FLOPs") if p.flops else "-",
                f"{p.seconds:.0f}",
            )
            for name, p in report.programs.items()
        ],
    )
    collectives = [
        (name, c.kind, f"{c.count:,}", _size(c.num_bytes)) for name, p in report.programs.items() for c in p.collectives
    ]
    if collectives:
        header = ("program", "kind", "count", "bytes")
        show_table("Collectives of one call", header, collectives)


def _show_flops(report: Report) -> None:
    flops = format_flops(report.programs["accumulate"].flops)
    print(
        f"An update's micro-batch: {flops}, {report.flops_over_6p:.3f} times 6P a token slot "
        f"(P = {report.num_params / 1e9:.4g} B;\nattention is counted whole, not only its causal half)\n"
    )
    longest = "" if report.forecast else ", the longest"
    show_table(
        f"Steps, with {report.mean_tokens:,.0f} tokens a sequence{longest}",
        ("group size", "rollouts", "tokens", "micro-batches", "FLOPs of the update"),
        [
            (s.group_size, s.num_rollouts, f"{s.num_tokens:,}", s.num_micro_batches, format_flops(s.flops))
            for s in report.steps
        ],
    )


def _show_forecast(report: Report) -> None:
    found = _forecast(report)
    if found is None:
        print("No forecast: it takes a profile in run_dir or profile.reuse, or the section `forecast`.")
        return
    flops = f"{format_flops(found['paper_flops'])} (paper), {format_flops(found['itemised_flops'])} (itemised)"
    print(f"Forecast of {found['method']}, {found['how']}: {found['num_steps']:,} steps, {flops}")
    if report.hours is None:
        print("For hours, give the section `hardware`.")
        return
    hours = ", ".join(f"{stage} {value:.3g}" for stage, value in found["hours"].items())
    print(f"Hours at the section's shares of the peak, without evaluation: {hours}")


def _size(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= 0.1 * GIB else f"{num_bytes / 2**20:.2f} MiB"
