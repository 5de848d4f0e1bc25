"""compute.json of a run: what its files say that profiling and evaluations cost, and what training itself spent."""

from dataclasses import replace
from pathlib import Path

from sgpo_jax import profiling
from sgpo_jax.algorithms.compute import Ledger, Stage, TokenCounts
from sgpo_jax.files import read_json, write_json
from sgpo_jax.run import Run, profile_of, read_evaluations
from sgpo_jax.types import UserError


def account(run: Run, own: Ledger) -> Ledger:
    """Write compute.json and return what it holds: the profile and all evaluations, as their own files say, and what
    training spent."""
    ledger = _ledger_of_files(run) + own
    write_json(run.dir / "compute.json", ledger.to_dict())
    return ledger


def own_ledger(run: Run) -> Ledger:
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
        ledger = ledger.add(Stage.PROFILING, profile_of(run).counts)
    for scores in read_evaluations(run).values():
        for score in scores.values():
            ledger = ledger.add(Stage.EVALUATION, TokenCounts(**score["counts"]))
    return ledger
