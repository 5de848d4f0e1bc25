"""From a judgement to the reward that the advantage is made of."""

from sgpo_jax.config import RewardsConfig
from sgpo_jax.types import Judgement, Verdict


def overlong_penalty(num_tokens: int, max_tokens: int, cache_tokens: int) -> float:
    """Soft penalty for long completions (DAPO, arXiv 2503.14476, section 3.4), lengths in tokens.

    0 up to max - cache, then falling linearly to -1 at max, and -1 beyond.
    """
    excess = num_tokens - (max_tokens - cache_tokens)
    return -min(max(excess / cache_tokens, 0.0), 1.0)


def reward_of(judgement: Judgement, num_tokens: int, config: RewardsConfig) -> float:
    """The shaped reward of one completion of `num_tokens` tokens.

    A score of 1 gives `config.correct`, 0 gives `config.wrong`, graded ones lie between; the overlong penalty is added
    where it is on. An error verdict has reward 0: such rollouts are masked, and stay out of the group's statistics.
    """
    if judgement.verdict is Verdict.ERROR:
        return 0.0
    reward = config.wrong + judgement.reward * (config.correct - config.wrong)
    if config.overlong:
        reward += overlong_penalty(num_tokens, config.overlong.max_tokens, config.overlong.cache_tokens)
    return reward
