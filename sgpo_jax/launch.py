"""The command line, `python -m sgpo_jax.launch COMMAND ...`. Exit code 0: done; 2: the input is wrong; 1: all else.

Nothing heavy is imported before a command runs: help is instant, and the verifier's workers stay free of JAX.
"""

import json
import logging
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from sgpo_jax import __version__
from sgpo_jax.types import MachineError, UserError

if TYPE_CHECKING:
    from sgpo_jax.config import Config

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 110}


@click.group(context_settings=CONTEXT)
@click.version_option(__version__)
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.pass_context
def cli(context: click.Context, debug: bool) -> None:
    """sGPO: reinforcement learning with verifiable rewards for a fraction of the compute.

    \b
    Examples:
      python -m sgpo_jax.launch run configs/demo.yaml
      python -m sgpo_jax.launch run configs/demo.yaml run_dir=runs/mine train.epochs=1
    """
    context.obj = debug


def command(example: str) -> Callable[[Callable[..., None]], click.Command]:
    """A command of the group whose help ends with an example, and whose errors are one line."""

    def decorate(function: Callable[..., None]) -> click.Command:
        @click.pass_context
        @wraps(function)
        def guarded(context: click.Context, *args: Any, **kwargs: Any) -> None:
            try:
                function(*args, **kwargs)
            except (click.exceptions.ClickException, click.exceptions.Exit, click.exceptions.Abort):
                raise
            except (Exception, KeyboardInterrupt) as error:
                cause = _told_to_others(error)
                if isinstance(cause, KeyboardInterrupt):
                    click.echo("interrupted: the same command goes on where this one stood", err=True)
                else:
                    _report(cause, debug=bool(context.obj))
                _end(2 if isinstance(cause, UserError) else 1)

        epilog = f"Example: python -m sgpo_jax.launch {example}"
        return cli.command(epilog=epilog, context_settings=CONTEXT)(guarded)

    return decorate


def _told_to_others(error: BaseException) -> BaseException:
    """Where this is one of several processes, the others know when this returns. Gives the cause of the error, which
    may be the failure of another process."""
    messages = sys.modules.get("sgpo_jax.hosts.messages")
    if messages is None:
        return error
    messages.fail(error)
    return messages.failure_of_another() or error


def _end(code: int) -> NoReturn:
    """Of several processes one that failed must not wait at its end for the others, as JAX would."""
    messages = sys.modules.get("sgpo_jax.hosts.messages")
    if messages is not None and messages.has_failed():
        sys.stdout.flush()
        sys.stderr.flush()
        messages.leave()
        os._exit(code)
    sys.exit(code)


def _report(error: BaseException, debug: bool) -> None:
    if debug:
        traceback.print_exception(error)
    message = " ".join(str(error).split())
    if isinstance(error, UserError | MachineError):
        click.echo(f"error: {message}", err=True)
    elif isinstance(error, OSError):
        click.echo(f"error: {error.filename or 'the machine'}: {error.strerror or message}", err=True)
    else:
        hint = "" if debug else " (run again with --debug before the command for the traceback)"
        click.echo(f"error: {type(error).__name__}: {message}{hint}", err=True)


def _with_config(function: Callable[..., Any]) -> Callable[..., Any]:
    overrides = click.argument("overrides", nargs=-1, metavar="[KEY.SUB=VALUE]...")
    return click.argument("config_file", metavar="CONFIG", type=click.Path(path_type=Path))(overrides(function))


def _run_stage(config_file: Path, overrides: tuple[str, ...], *stages: Callable[..., Any]) -> None:
    from sgpo_jax.config import load_config

    config = load_config(config_file, overrides)
    if config.hosts.num_processes == 1:
        _lead_stages(config, stages)
        return
    from sgpo_jax.hosts.supervision import supervise

    supervise(debug=click.get_current_context().obj)
    from sgpo_jax.hosts import messages

    messages.start(config.hosts)
    if messages.is_leader():
        _lead_stages(config, stages)
    else:
        from sgpo_jax.followers import follow_run

        follow_run(config)


def _lead_stages(config: "Config", stages: Sequence[Callable[..., Any]]) -> None:
    from sgpo_jax import pipeline
    from sgpo_jax.run import open_run

    with open_run(config) as run:
        for stage in stages:
            stage(pipeline, run)


@command("run configs/demo.yaml run_dir=runs/mine")
@_with_config
def run(config_file: Path, overrides: tuple[str, ...]) -> None:
    """All stages: profile, plan, train, evaluate. Started again, it resumes."""
    _run_stage(config_file, overrides, lambda pipeline, run: pipeline.run_all(run))


@command("profile configs/demo.yaml")
@_with_config
def profile(config_file: Path, overrides: tuple[str, ...]) -> None:
    """Sample every query a few times: profile.jsonl."""
    _run_stage(config_file, overrides, lambda pipeline, run: pipeline.profile_stage(run))


@command("plan --compare configs/qwen2.5-math-7b-forecast.yaml")
@click.option("--compare", is_flag=True, help="Only show what every method would cost, from a profile or a histogram.")
@_with_config
def plan(config_file: Path, overrides: tuple[str, ...], compare: bool) -> None:
    """What to train on, in which groups and order, and what it will cost: plan.json."""
    if compare:
        from sgpo_jax import pipeline
        from sgpo_jax.config import load_config

        pipeline.compare_methods(load_config(config_file, overrides))
        return
    _run_stage(config_file, overrides, lambda pipeline, run: pipeline.plan_stage(run))


@command("train configs/demo.yaml")
@_with_config
def train(config_file: Path, overrides: tuple[str, ...]) -> None:
    """Train, resuming from the newest checkpoint. sGPO needs a profile and a plan, the other methods do not."""
    _run_stage(config_file, overrides, lambda pipeline, run: pipeline.train_stage(run))


@command("evaluate configs/demo.yaml")
@_with_config
def evaluate(config_file: Path, overrides: tuple[str, ...]) -> None:
    """Score the newest weights on the evaluation sets: eval/final.json, or eval/initial.json before training."""
    _run_stage(config_file, overrides, lambda pipeline, run: pipeline.evaluate_newest(run))


@command("study configs/study-small.yaml num_workers=2")
@_with_config
@click.option("--dry-run", "action", flag_value="list", help="Only list the runs with their state.")
@click.option("--report", "action", flag_value="report", help="Only write tables and figures of what is finished.")
def study(config_file: Path, overrides: tuple[str, ...], action: str | None) -> None:
    """Methods x seeds side by side: tables and figures. Started again, it goes on where it stood."""
    from sgpo_jax.study.conduct import conduct, show_cells, write_report
    from sgpo_jax.study.config import load_study

    do = {"list": show_cells, "report": write_report, None: conduct}[action]
    do(load_study(config_file, overrides), config_file)


@command("check configs/qwen2.5-math-7b.yaml --allow-missing")
@_with_config
@click.option(
    "--devices",
    type=click.IntRange(min=1),
    help="Of the trainer; default: what the section hardware and the placement give it.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.option(
    "--allow-missing",
    is_flag=True,
    help="Check elsewhere than on the machine of the run: a model, data or vLLM environment that is not here is listed "
    "as not checked, and is no error.",
)
def check(
    config_file: Path, overrides: tuple[str, ...], devices: int | None, as_json: bool, allow_missing: bool
) -> None:
    """Before anything is spent: whether all is there, what fits in memory, and what it will cost.

    Compiles the run's own programs for its devices, which need not be there; fetches nothing. Exit code 0: ready.
    """
    from sgpo_jax.check.command import check

    sys.exit(check(config_file, overrides, num_devices=devices, as_json=as_json, allow_missing=allow_missing))


@command("export runs/demo exported/demo export.dtype=float32")
@click.argument("run_dir", metavar="RUN", type=click.Path(path_type=Path))
@click.argument("out", metavar="OUT", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, metavar="[KEY.SUB=VALUE]...")
@click.option("--step", type=int, help="Which checkpoint; default: the newest.")
def export(run_dir: Path, out: Path, overrides: tuple[str, ...], step: int | None) -> None:
    """A checkpoint of a run as a Hugging Face directory; the run may go on meanwhile."""
    from sgpo_jax import pipeline
    from sgpo_jax.run import config_of

    pipeline.export_run(config_of(run_dir, overrides), out, step)


@command("convert Qwen2.5-0.5B orbax/Qwen2.5-0.5B")
@click.argument("source", metavar="SRC", type=click.Path(path_type=Path))
@click.argument("destination", metavar="DST", type=click.Path(path_type=Path))
@click.option(
    "--dtype", type=click.Choice(["float32", "bfloat16", "float16"]), help="Of a Hugging Face DST; default: as in SRC."
)
@click.option("--max-shard-mb", type=click.IntRange(min=1), default=5000, show_default=True)
def convert(source: Path, destination: Path, dtype: str | None, max_shard_mb: int) -> None:
    """A Hugging Face directory to an Orbax checkpoint, or back; the direction follows from what SRC is."""
    from sgpo_jax.conversion import convert

    click.echo(convert(source, destination, dtype=dtype, max_shard_bytes=max_shard_mb * 10**6))


@command('generate sgpo_jax/demo/model --raw --prompt "23+8*3=" --num 4')
@click.argument("model")
@click.option("--prompt", help="One prompt.")
@click.option("--prompts", type=click.Path(path_type=Path), help='A JSON-lines file of {"prompt": ...}.')
@click.option("--num", type=click.IntRange(min=1), default=1, show_default=True, help="Completions of each prompt.")
@click.option("--temperature", type=click.FloatRange(min=0), default=1.0, show_default=True, help="0: greedy.")
@click.option("--top-p", type=click.FloatRange(min=0, max=1, min_open=True), default=1.0, show_default=True)
@click.option("--max-tokens", type=click.IntRange(min=1), default=512, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--raw", is_flag=True, help="Without the chat template.")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32", show_default=True)
@click.option("--out", type=click.Path(path_type=Path), help="Write JSON lines here; default: standard output.")
def generate(
    model: str,
    prompt: str | None,
    prompts: Path | None,
    num: int,
    temperature: float,
    top_p: float,
    max_tokens: int,
    seed: int,
    raw: bool,
    dtype: str,
    out: Path | None,
) -> None:
    """Completions of a model."""
    from sgpo_jax.files import write_jsonl
    from sgpo_jax.generation import GenerateOptions, generate, read_prompts

    if (prompt is None) == (prompts is None):
        raise UserError("give either --prompt TEXT or --prompts FILE.jsonl")
    texts = [prompt] if prompt is not None else read_prompts(prompts or Path())
    rows = generate(model, texts, GenerateOptions(num, temperature, top_p, max_tokens, seed, raw, dtype))
    if out is not None:
        write_jsonl(out, rows)
        return
    for row in rows:
        click.echo(json.dumps(row))  # ASCII only: a completion cannot control the terminal


@command("verify answers.jsonl --kind math")
@click.argument("file", metavar="FILE", type=click.Path(path_type=Path))
@click.option("--kind", type=click.Choice(["math", "choice", "exact"]), default="math", show_default=True)
@click.option("--boxed-only", is_flag=True, help="A final answer that is stated without a box does not count.")
@click.option("--out", type=click.Path(path_type=Path), help="Write the lines with their verdicts here.")
def verify(file: Path, kind: str, boxed_only: bool, out: Path | None) -> None:
    """Judge {"gold", "completion"[, "expected"]} lines; with `expected`, show the agreement and each disagreement."""
    from sgpo_jax.config import RewardsConfig
    from sgpo_jax.rewards.verify_file import verify_file

    config = RewardsConfig(accept_stated_answer=not boxed_only)
    for line in verify_file(file, kind, out, config).lines():
        click.echo(line)


def main() -> None:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it warns that torch is not there
    # Compiled programs are kept for the next start; JAX reads this when it is first imported.
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "sgpo_jax" / "xla"
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.5")
    logging.getLogger("absl").setLevel(logging.CRITICAL)  # Orbax logs there what it raises as well
    cli()


if __name__ == "__main__":
    main()
