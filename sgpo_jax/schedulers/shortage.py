"""What to say when the refill of a step (section `refill`) found too few informative groups."""

from collections import Counter

from sgpo_jax.algorithms.greso import Outcome
from sgpo_jax.config import RefillConfig
from sgpo_jax.types import UserError


def shortage(
    refill: RefillConfig,
    outcomes: Counter[Outcome],
    num_kept: int,
    num_wanted: int,
    *,
    tried: tuple[str, str],
    more: str,
) -> UserError:
    """The error of a step that may not be short.

    outcomes: of its judged groups. num_kept, num_wanted: informative groups it has, and needs. tried: how the method
    calls its rounds, and their groups. more: what of its own settings would help.
    """
    rounds, groups = tried
    total = outcomes.total()
    share = outcomes[Outcome.MIXED] / total if total else 0.0
    return UserError(
        f"after refill.max_rounds={refill.max_rounds} {rounds}, {num_kept} of {num_wanted} groups of the step are "
        f"informative: {share:.1%} of {total} judged {groups} ({outcomes[Outcome.ALL_CORRECT]} all correct, "
        f"{outcomes[Outcome.ALL_WRONG]} all wrong). Use harder or easier data, {more}, more refill.max_rounds, or "
        "refill.when_short=train"
    )
