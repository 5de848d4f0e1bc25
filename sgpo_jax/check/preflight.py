"""Whether what a configuration names is there and of use: directory, model, data, verifiers, the servers' environment.

Nothing is fetched, started or written, but for the workers that judge and the servers' interpreter, asked its version.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from sgpo_jax.config import Config, SourceConfig, source_name
from sgpo_jax.data.formats import Refusal, to_example
from sgpo_jax.data.queries import load_queries
from sgpo_jax.data.sources import read_rows
from sgpo_jax.data.templates import stop_token_ids
from sgpo_jax.models.architecture import Architecture
from sgpo_jax.models.published import PUBLISHED
from sgpo_jax.rewards import VerifierPool
from sgpo_jax.rollouts.vllm_client import check_version
from sgpo_jax.run import Run, check_owner, check_positions
from sgpo_jax.telemetry import check_trackers
from sgpo_jax.types import MachineError, Query, UserError, Verdict

_VERSION_LIMIT_S = 60.0
_ROWS_READ = 1000  # of a source that cannot be rendered


@dataclass(slots=True)
class Findings:
    """Lines for a person. missing: what is not on this machine; not_checked: what could not be looked at for that, or
    is looked at only when the run starts; problems: what would end the run.

    longest_prompt: tokens of the longest prompt where the data could be rendered, else the bound of the configuration.
    queries: those of data.train, where they could be loaded.
    """

    checked: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    not_checked: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    arch: Architecture | None = None
    longest_prompt: int = 0
    queries: tuple[Query, ...] = ()

    @contextmanager
    def finding(self) -> Iterator[None]:
        """The user's errors inside are problems; the rest of the check goes on."""
        try:
            yield
        except UserError as error:
            self.problems.append(str(error))


def preflight(config: Config) -> Findings:
    """Look at everything; stop at nothing."""
    findings = Findings(longest_prompt=config.data.max_prompt_tokens)
    run = Run(config, mesh=None)
    _look_at_directory(config, findings)
    has_tokenizer = _look_at_model(run, findings)
    queries = _look_at_data(run, findings, has_tokenizer)
    _look_at_verifiers(config, queries, findings)
    with findings.finding():
        check_trackers(config.telemetry)
    if findings.arch is not None:
        with findings.finding():
            check_positions(config, findings.arch, findings.longest_prompt)
    _look_at_server(config, findings)
    return findings


def _look_at_directory(config: Config, findings: Findings) -> None:
    path = Path(config.run_dir)
    existing = next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists())
    with findings.finding():
        if not existing.is_dir() or not os.access(existing, os.W_OK):
            raise UserError(
                f"run_dir={path}: cannot be made, since {existing} is no directory to write in; name another"
            )
        check_owner(config)
        findings.checked.append(f"run_dir={path}: {'is there' if existing == path.absolute() else 'can be made'}")


def _look_at_model(run: Run, findings: Findings) -> bool:
    """Whether there is a tokenizer to render with."""
    name = run.config.model.path
    try:
        directory = run.model_dir
    except UserError:
        findings.arch = PUBLISHED.get(name)
        findings.missing.append(f"model.path={name}: neither a directory nor in the hub's cache")
        known = "its architecture is the published one" if findings.arch else "its architecture is not known"
        findings.not_checked.append(f"weights, tokenizer and template of {name} ({known})")
        return False
    with findings.finding():
        findings.arch = run.arch
        findings.checked.append(f"model.path={name}: {run.num_params / 1e6:,.1f} M parameters, {run.arch.family}")
    has_weights = any(directory.glob("*.safetensors"))
    if not has_weights:
        findings.missing.append(f"model.path={name}: {directory} has no *.safetensors")
        findings.not_checked.append(f"weights of {name}")
    try:
        ends = stop_token_ids(directory, run.tokenizer)
    except UserError as error:
        if has_weights:
            findings.problems.append(str(error))
        else:  # a directory with little more than a config.json
            findings.missing.append(str(error))
            findings.not_checked.append(f"tokenizer and template of {name}")
        return False
    findings.checked.append(f"tokenizer: a completion ends with one of {', '.join(map(str, ends))}")
    return True


def _look_at_data(run: Run, findings: Findings, has_tokenizer: bool) -> list[Query]:
    """The queries of training and evaluation that could be rendered."""
    config = run.config
    here, absent = _present(config.data.train, findings)
    evaluation, _ = _present(config.evaluate.sets, findings)
    if not has_tokenizer:
        for source in (*here, *evaluation):
            with findings.finding():
                findings.checked.append(f"{source_name(source)}: {_count(source)}; not rendered")
        return []
    queries: list[Query] = []
    if here and not absent:
        with findings.finding():
            findings.queries = run.loaded.queries
            findings.checked += [f"data.train: {line}" for line in run.loaded.report.lines()]
            findings.checked.append(f"data.template: the first prompt is {findings.queries[0].prompt[:200]!r}")
            queries += findings.queries
    any_language = config.data.model_copy(update={"language": "any"})  # as Run has it
    for source in evaluation:
        with findings.finding():
            loaded = load_queries([source], any_language, run.tokenizer, config.seed)
            findings.checked += [f"evaluate.sets: {line}" for line in loaded.report.lines()]
            queries += loaded.queries
    if queries and not absent:
        findings.longest_prompt = max(len(query.prompt_ids) for query in queries)
        findings.checked.append(f"the longest prompt has {findings.longest_prompt} tokens")
    return queries


def _present(sources: Sequence[SourceConfig], findings: Findings) -> tuple[list[SourceConfig], list[SourceConfig]]:
    """Sources of which a row can be read here, and those that are not on this machine."""
    here: list[SourceConfig] = []
    absent: list[SourceConfig] = []
    for source in sources:
        with findings.finding():
            try:
                is_here = not _is_absent_file(source) and bool(next(read_rows(source)))
            except MachineError:  # the hub cannot be asked, and its cache has no such set
                is_here = False
            (here if is_here else absent).append(source)
            if not is_here:
                findings.missing.append(f"{source.path}: not on the disk")
                findings.not_checked.append(f"questions of {source.path}")
    return here, absent


def _is_absent_file(source: SourceConfig) -> bool:
    path = Path(source.path.rpartition("@")[2])
    return path.suffix in (".jsonl", ".json", ".parquet", ".csv") and not path.exists()


def _count(source: SourceConfig) -> str:
    examples = [to_example(row, source.kind) for row in islice(read_rows(source), _ROWS_READ)]
    num_questions = sum(not isinstance(example, Refusal) for example in examples)
    if not num_questions:
        raise UserError(f"{source.path}: none of its first {len(examples)} rows is a question with a verifiable answer")
    return f"{num_questions} of the first {len(examples)} rows are questions with a verifiable answer"


def _look_at_verifiers(config: Config, queries: Sequence[Query], findings: Findings) -> None:
    """A gold answer of each kind is judged, and must be right."""
    kinds = {source.kind for source in (*config.data.train, *config.evaluate.sets)} - {"auto"}
    examples = {query.kind: query for query in reversed(queries)}
    if not examples:
        examples = {kind: _question(kind) for kind in kinds & {"math", "exact", "numeric"} or {"math"}}
        findings.not_checked += [f"the verifier {kind}, for want of a question" for kind in kinds - examples.keys()]
    with VerifierPool(config.rewards.model_copy(update={"num_workers": 1})) as pool:
        for kind, query in sorted(examples.items()):
            judgement = pool.submit(query, _right_answer(query)).result()
            if judgement.verdict is Verdict.CORRECT:
                findings.checked.append(f"the verifier {kind} judges a right answer right")
            elif judgement.verdict is Verdict.ERROR:
                findings.problems.append(f"the verifier {kind} fails on {query.gold[:80]!r}: {judgement.detail}")
            elif ":" in kind:  # a function of the user's own may want another form
                findings.not_checked.append(f"the verifier {kind}: it answers, but not right to the boxed gold answer")
            else:
                findings.problems.append(f"the verifier {kind} judges the gold answer {query.gold[:80]!r} wrong")


def _question(kind: str) -> Query:
    return Query("check", "6 x 7", "42", kind, "check", "6 x 7", (0,))


def _right_answer(query: Query) -> str:
    """A completion that answers with the gold answer, as the query's kind wants it."""
    metadata = query.metadata
    if query.kind == "exact" and not metadata.get("boxed"):
        return f"{metadata.get('answer_after') or ''}{query.gold}{metadata.get('answer_end') or ''}"
    return rf"The answer is \boxed{{{query.gold}}}."


def _look_at_server(config: Config, findings: Findings) -> None:
    """The environment of vLLM servers that the run starts; others are asked when it starts."""
    if config.rollouts.engine != "vllm":
        return
    if config.vllm.urls:
        findings.not_checked.append(f"the servers {', '.join(config.vllm.urls)}: the run asks them when it starts")
        return
    program, *arguments = config.vllm.command
    if shutil.which(program) is None:
        findings.missing.append(f"vllm.command: {program} is no program here; `bash tools/setup_vllm.sh` makes it")
        findings.not_checked.append("the environment of the vLLM servers")
    elif arguments[:1] != ["-m"]:
        findings.not_checked.append(f"the version of vLLM, since vllm.command={program} is no Python interpreter")
    else:
        with findings.finding():
            version = _vllm_version(program)
            check_version(version, f"vllm.command={program}")
            findings.checked.append(f"vllm.command: vLLM {version}")


def _vllm_version(python: str) -> str:
    code = "import importlib.metadata as m; print(m.version('vllm'))"
    try:
        asked = subprocess.run(
            [python, "-c", code], capture_output=True, text=True, timeout=_VERSION_LIMIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"vllm.command: {python} does not run: {error}") from None
    if asked.returncode:
        reason = asked.stderr.strip().splitlines()[-1:] or ["no reason given"]
        raise UserError(
            f"vllm.command: {python} has no vLLM ({reason[0][:200]}); `bash tools/setup_vllm.sh` makes one that has"
        )
    return asked.stdout.strip()
