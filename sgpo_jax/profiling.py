"""The offline profile: a few samples of every query from the initial policy (sGPO, arXiv 2606.08854, section 4.1)."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sgpo_jax.algorithms.allocation import ProfileRow, profile_row
from sgpo_jax.algorithms.compute import TokenCounts
from sgpo_jax.algorithms.sequential import num_samples_wanted
from sgpo_jax.config import Config
from sgpo_jax.files import append_jsonl, read_json, read_jsonl, write_json, write_jsonl
from sgpo_jax.rollouts.collect import Collector
from sgpo_jax.telemetry import Stopwatch, progress
from sgpo_jax.types import GroupRequest, Purpose, Query, SamplingParams, UserError


@dataclass(frozen=True, slots=True)
class ProfileIdentity:
    """What a profile depends on beside the queries. Two profiles of equal identity may stand for each other.

    model, template, verifier: digests. sampling: number of samples and when they are enough, temperature, length limit.
    kinds: the verifiers that judged; a profile serves those who need some of them.
    """

    model: str
    template: str
    verifier: str
    kinds: tuple[str, ...]
    sampling: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Profile:
    """rows: one a query, in the order of the queries. counts: the tokens that making it took."""

    rows: tuple[ProfileRow, ...]
    counts: TokenCounts


def profile_sampling(config: Config) -> dict[str, Any]:
    """The sampling part of a profile's identity: of sequential profiling, what its stops depend on too."""
    profile, sgpo = config.profile, config.sgpo
    sequential = {
        "stages": list(profile.stages),
        "certainty": profile.certainty,
        **sgpo.model_dump(mode="json", include={"max_success_rate", "group_sizes", "rounding"}),
    }
    return {
        **(sequential if profile.stages else {}),
        "num_samples": config.profile.num_samples,
        "temperature": config.rollouts.temperature,
        "top_p": config.rollouts.top_p,
        "max_completion_tokens": config.rollouts.max_completion_tokens,
    }


def verifier_digest(config: Config) -> str:
    """Of every setting that can change a verdict."""
    settings = config.rewards.model_dump(
        mode="json", include={"correct_threshold", "accept_stated_answer", "time_limit_s", "memory_limit_mb"}
    )
    return hashlib.blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=16).hexdigest()


def make_profile(
    queries: Sequence[Query], collector: Collector, config: Config, identity: ProfileIdentity, run_dir: Path
) -> Profile:
    """Profile every query that profile.jsonl does not hold yet, a line each as its samples are judged.

    With profile.stages a query is sampled in several rounds, each a prefix of what would be sampled at once, and gets a
    line after each, of which the last one counts. A killed profile goes on where it stood. At the end the lines are put
    into the order of the queries, and profile.json says how the profile was made; only then is it complete.
    """
    path = run_dir / "profile.jsonl"
    rows = _read_rows(path) if path.exists() else {}
    write_jsonl(path, map(asdict, rows.values()))  # without a torn last line, so that the next one starts afresh
    rollouts = config.rollouts
    sampling = SamplingParams(rollouts.max_completion_tokens, rollouts.temperature, rollouts.top_p)
    requests = _requests(queries, rows, config)
    watch = Stopwatch()
    with progress("profile", len(queries), done=len(queries) - len(requests)) as bar:
        while requests:
            for group in collector.collect(requests, sampling):
                query_id, row = group.query.query_id, profile_row(group)
                rows[query_id] = rows[query_id] + row if query_id in rows else row
                append_jsonl(path, asdict(rows[query_id]))
                is_done = num_samples_wanted(rows[query_id], config.profile, config.sgpo) == 0
                bar.advance(int(is_done))
            requests = _requests(queries, rows, config)
    ordered = tuple(rows[query.query_id] for query in queries)
    write_jsonl(path, map(asdict, ordered))
    counts = profile_counts(ordered, queries, config.profile.stages)
    write_json(run_dir / "profile.json", _description(identity, ordered, counts, watch.seconds()["total"]))
    return Profile(ordered, counts)


def _requests(queries: Sequence[Query], rows: Mapping[str, ProfileRow], config: Config) -> list[GroupRequest]:
    """The next round: what is still to be drawn of each query, up to its next look."""
    requests = []
    for query in queries:
        row = rows.get(query.query_id)
        if num_wanted := num_samples_wanted(row, config.profile, config.sgpo):
            requests.append(GroupRequest(query, num_wanted, Purpose.PROFILE, first_sample=row.num_drawn if row else 0))
    return requests


def profile_counts(rows: Sequence[ProfileRow], queries: Sequence[Query], stages: Sequence[int]) -> TokenCounts:
    """Tokens that the profile of these queries took, however many runs share it. A prompt is read in every round."""
    prompt_tokens = {query.query_id: len(query.prompt_ids) for query in queries}
    return TokenCounts(
        generated=sum(row.num_tokens for row in rows),
        prompt_generated=sum(
            prompt_tokens[row.query_id] * (1 + sum(stage < row.num_drawn for stage in stages)) for row in rows
        ),
    )


def is_complete(run_dir: Path) -> bool:
    return (run_dir / "profile.json").exists()


def read_profile(run_dir: Path, queries: Sequence[Query], identity: ProfileIdentity) -> Profile:
    """The profile of a run directory, for these queries (all of its own, or a part).

    Raises UserError naming the difference where it was made with another model, template, verifier or sampling, or
    lacks a query.
    """
    description = read_json(run_dir / "profile.json")
    made_with = description.get("identity") if isinstance(description, dict) else None
    if not isinstance(made_with, dict):
        raise UserError(f"{run_dir / 'profile.json'}: not the description of a profile; remove it and profile again")
    for name, wanted in asdict(identity).items():
        if name == "kinds" and set(wanted) <= set(made_with.get(name, ())):
            continue
        if made_with.get(name) != wanted:
            raise UserError(
                f"{run_dir / 'profile.json'}: made with another {name} ({made_with.get(name)}, this run has {wanted}); "
                "profile again in a new run_dir, or name another profile.reuse"
            )
    rows = _read_rows(run_dir / "profile.jsonl")
    missing = [query.query_id for query in queries if query.query_id not in rows]
    if missing:
        raise UserError(
            f"{run_dir / 'profile.jsonl'}: lacks {len(missing)} of {len(queries)} queries, such as {missing[0]}; "
            "profile the whole data set, or leave out profile.reuse"
        )
    ordered = tuple(rows[query.query_id] for query in queries)
    return Profile(ordered, profile_counts(ordered, queries, identity.sampling.get("stages", ())))


def _read_rows(path: Path) -> dict[str, ProfileRow]:
    try:
        rows = [ProfileRow(**row) for row in read_jsonl(path, torn_tail=True)]
    except TypeError as error:
        raise UserError(f"{path}: not lines of a profile: {error}") from None
    return {row.query_id: row for row in rows}


def _description(
    identity: ProfileIdentity, rows: Sequence[ProfileRow], counts: TokenCounts, seconds: float
) -> dict[str, Any]:
    return {
        "identity": asdict(identity),
        "num_queries": len(rows),
        "num_samples": sum(row.num_samples for row in rows),
        "num_correct": sum(row.num_correct for row in rows),
        "num_truncated": sum(row.num_truncated for row in rows),
        "num_errors": sum(row.num_errors for row in rows),
        "tokens": asdict(counts),
        "seconds": seconds,
    }
