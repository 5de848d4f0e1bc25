"""What a run costs: tokens counted by stage, turned into FLOPs by two ledgers; and a forecast of both.

The paper ledger charges as the authors of sGPO do (arXiv 2606.08854, appendix G.4), so that numbers compare with
theirs. The itemised ledger charges what was really computed. P is the number of model parameters; a forward pass costs
2P a token, a backward pass 4P. FLOPs are exact integers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from enum import StrEnum
from typing import Any

from sgpo_jax.algorithms.allocation import Phase, bucket_of, exact
from sgpo_jax.config import SGPOConfig

EXA = 10**18


class Stage(StrEnum):
    """Profiling and training are charged. Evaluation and wasted work (repeated after a kill) are reported apart."""

    PROFILING = "profiling"
    TRAINING = "training"
    EVALUATION = "evaluation"
    WASTED = "wasted"


CHARGED = (Stage.PROFILING, Stage.TRAINING)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCounts:
    """Tokens by what was computed on them. Padding is not counted.

    generated: completion tokens sampled, dropped groups included; trained: those in the update.
    reused: completion tokens of trained groups that were generated, and charged, in profiling.
    prompt_generated: prompt tokens read by the sampler, a group's prompt once (prefix caching).
    prompt_trained: prompt tokens in the update, once for each rollout.
    old_logprobs, ref_logprobs: prompt and completion tokens of the extra forward passes, where they were made.
    rematerialised: prompt and completion tokens whose activations the backward pass computed again.
    """

    generated: int = 0
    trained: int = 0
    reused: int = 0
    prompt_generated: int = 0
    prompt_trained: int = 0
    old_logprobs: int = 0
    ref_logprobs: int = 0
    rematerialised: int = 0

    @property
    def num_completion(self) -> int:
        """Completion tokens that passed through sampler or update, twice where through both; grows as a stage does."""
        return self.generated + self.trained

    def __add__(self, other: "TokenCounts") -> "TokenCounts":
        return TokenCounts(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    def __sub__(self, other: "TokenCounts") -> "TokenCounts":
        return TokenCounts(**{f.name: getattr(self, f.name) - getattr(other, f.name) for f in fields(self)})


def paper_flops(stage: Stage, counts: TokenCounts, num_params: int) -> int:
    """2P for each token generated; in training 12P, dropped groups included; prompts are free (appendix G.4).

    The 12P stand for rollout 2P, reference 2P and update 6P, rounded up by the authors; DAPO has no reference model.
    *Reading*, since the authors' method trains on nothing of its profile: a token that is trained after all costs the
    other 10P then, so that in the end it cost as much as any.
    """
    if stage is Stage.TRAINING:
        return num_params * (12 * counts.generated + 10 * counts.reused)
    return 2 * num_params * counts.generated


def itemised_flops(counts: TokenCounts, num_params: int) -> int:
    """2P for each token of a forward pass that was made, 6P for each token of the update; prompts are charged.

    A reused token is among the generated of profiling and the trained of training, and so needs no charge of its own.
    """
    forward = counts.generated + counts.prompt_generated + counts.old_logprobs + counts.ref_logprobs
    update = counts.trained + counts.prompt_trained
    return num_params * (2 * (forward + counts.rematerialised) + 6 * update)


def _no_tokens() -> dict[Stage, TokenCounts]:
    return dict.fromkeys(Stage, TokenCounts())


@dataclass(frozen=True, slots=True)
class Ledger:
    """All token counts of a run so far, by stage. Part of every checkpoint, and what compute.json is made of."""

    num_params: int
    tokens: Mapping[Stage, TokenCounts] = field(default_factory=_no_tokens)

    def add(self, stage: Stage, counts: TokenCounts) -> "Ledger":
        """A ledger with `counts` on top of the stage's."""
        return replace(self, tokens={**self.tokens, stage: self.tokens[stage] + counts})

    def __add__(self, other: "Ledger") -> "Ledger":
        return replace(self, tokens={stage: self.tokens[stage] + other.tokens[stage] for stage in Stage})

    def resumed(self, latest: "Ledger") -> "Ledger":
        """The ledger to go on with after a kill: self is the checkpoint's, `latest` the last one that was written.

        What `latest` has beyond the checkpoint will be repeated, so it counts as wasted. One that has less (its file
        was lost) says nothing.
        """
        wasted = latest.tokens[Stage.WASTED]
        for stage in CHARGED:
            if latest.tokens[stage].num_completion > self.tokens[stage].num_completion:
                wasted += latest.tokens[stage] - self.tokens[stage]
        return replace(self, tokens={**self.tokens, Stage.WASTED: wasted})

    @property
    def paper_flops(self) -> int:
        return sum(paper_flops(stage, self.tokens[stage], self.num_params) for stage in CHARGED)

    @property
    def itemised_flops(self) -> int:
        return sum(itemised_flops(self.tokens[stage], self.num_params) for stage in CHARGED)

    def to_dict(self) -> dict[str, Any]:
        """Counts and both ledgers of each stage, and the totals of the charged stages, as JSON values."""
        stages = {
            stage.value: {
                "tokens": asdict(counts),
                **_both(paper_flops(stage, counts, self.num_params), itemised_flops(counts, self.num_params)),
            }
            for stage, counts in self.tokens.items()
        }
        total = _both(self.paper_flops, self.itemised_flops)
        return {"num_params": self.num_params, "stages": stages, "total": total}

    @classmethod
    def from_dict(cls, tree: Mapping[str, Any]) -> "Ledger":
        """The inverse of `to_dict`; FLOPs are computed anew. Raises KeyError or TypeError for any other tree."""
        return cls(tree["num_params"], {stage: TokenCounts(**tree["stages"][stage]["tokens"]) for stage in Stage})


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanLengths:
    """Mean tokens of a completion in profiling and in training, and of a prompt.

    *Reading* of the paper's totals at 7B: 932 in profiling, and the 1,083 of DAPO's training for every method and
    group size, although harder queries have longer completions.
    """

    profiling: float
    training: float
    prompt: float


@dataclass(frozen=True, slots=True)
class PhaseSize:
    """How many queries are rolled out with a group size, and how many groups are expected to be trained.

    num_reused: completions of the trained groups that profiling sampled.
    """

    group_size: int
    num_queries: int
    num_trained: float
    num_reused: int = 0


@dataclass(frozen=True, slots=True)
class Forecast:
    ledger: Ledger
    num_steps: int


def sizes_of(phases: Sequence[Phase]) -> tuple[PhaseSize, ...]:
    """Of planned phases. sGPO refills nothing: every group is trained."""
    return tuple(PhaseSize(p.group_size, len(p.query_ids), len(p.query_ids)) for p in phases)


def phases_of_histogram(
    num_queries_of: Mapping[int, int], num_samples: int, config: SGPOConfig, epochs: int
) -> tuple[PhaseSize, ...]:
    """The sizes of the plan of a profile of which only the histogram is known: num_correct -> number of queries."""
    buckets = {k: bucket_of(k, num_samples, config) for k in num_queries_of}
    share = round(exact(config.unsolved_frac) * num_queries_of.get(0, 0))
    phases = []
    for epoch in range(1, epochs + 1):
        num_mixed_in = share if epoch >= config.unsolved_from_epoch else 0
        for group_size in config.group_sizes:
            num_learnable = sum(num_queries_of[k] for k, bucket in buckets.items() if bucket == group_size)
            if num_learnable:
                num_queries = num_learnable + num_mixed_in
                phases.append(PhaseSize(group_size, num_queries, num_queries))
    return tuple(phases)


def uniform_phases(
    num_queries_of: Mapping[int, int], num_samples: int, group_size: int, epochs: int
) -> tuple[PhaseSize, ...]:
    """DAPO with dynamic sampling: an epoch rolls every query out once, and trains the groups whose outcomes differ.

    num_queries_of: num_correct of num_samples -> number of queries. A group of G is informative with probability
    1 - p^G - (1-p)^G, with the profiled success rate for p: the rates of the initial policy, a query never solved in
    profiling counts as never informative.
    """
    rates = {k / num_samples: count for k, count in num_queries_of.items()}
    num_trained = sum(count * (1 - p**group_size - (1 - p) ** group_size) for p, count in rates.items())
    return (PhaseSize(group_size, sum(num_queries_of.values()), num_trained),) * epochs


def forecast(
    phases: Sequence[PhaseSize],
    lengths: MeanLengths,
    *,
    num_params: int,
    prompts_of_step: Callable[[float], int],
    rematerialise: bool,
    num_profiled: int = 0,
    num_profile_completions: int = 0,
) -> Forecast:
    """Expected tokens, FLOPs and steps of a run with one update a step, so without passes for old log-probabilities.

    num_profiled queries are profiled, with num_profile_completions in all (none for DAPO). The last step of a phase may
    be short. prompts_of_step: queries of a step, by the group size. rematerialise: whether the backward pass computes
    the activations again.
    """
    ledger = Ledger(num_params).add(
        Stage.PROFILING,
        TokenCounts(
            generated=round(num_profile_completions * lengths.profiling),
            prompt_generated=round(num_profiled * lengths.prompt),
        ),
    )
    for phase in phases:
        ledger = ledger.add(Stage.TRAINING, _phase_counts(phase, lengths, rematerialise))
    num_steps = sum(-(-round(phase.num_trained) // prompts_of_step(phase.group_size)) for phase in phases)
    return Forecast(ledger, num_steps)


def _phase_counts(phase: PhaseSize, lengths: MeanLengths, rematerialise: bool) -> TokenCounts:
    num_fresh = phase.num_trained * phase.group_size - phase.num_reused
    trained = round(num_fresh * lengths.training + phase.num_reused * lengths.profiling)
    prompt_trained = round(phase.num_trained * phase.group_size * lengths.prompt)
    return TokenCounts(
        generated=round(phase.num_queries * phase.group_size * lengths.training),
        trained=trained,
        reused=round(phase.num_reused * lengths.profiling),
        prompt_generated=round(phase.num_queries * lengths.prompt),
        prompt_trained=prompt_trained,
        rematerialised=(trained + prompt_trained) if rematerialise else 0,
    )


def _both(paper: int, itemised: int) -> dict[str, Any]:
    return {
        "paper": {"flops": paper, "exaflops": paper / EXA},
        "itemised": {"flops": itemised, "exaflops": itemised / EXA},
    }
