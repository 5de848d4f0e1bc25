"""Knapsack RL (arXiv 2509.25849): a step's rollouts as a budget, spent where a rollout is worth most."""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

MIN_ROLLOUTS = 2
MAX_ROLLOUTS = 128
MISS_PROBABILITY = 0.1  # of seeing only one kind of outcome with useful_rollouts(p) rollouts


@dataclass(frozen=True, slots=True)
class QueryHistory:
    """A query's judged rollouts of the previous epoch; num_judged 0: none yet."""

    query_id: str
    num_correct: int
    num_judged: int


def rollout_value(num_rollouts: int, success_rate: float) -> float:
    """[1 - p^n - (1-p)^n] · p (1-p)²: the chance of a group with a gradient, times what that gradient is worth."""
    p, q = success_rate, 1 - success_rate
    return (1 - p**num_rollouts - q**num_rollouts) * p * q**2


def marginal_value(num_rollouts: int, success_rate: float) -> float:
    """Value of one rollout more: p (1-p)² [p^n (1-p) + (1-p)^n p]. It falls with n, so that greedy is exact."""
    p, q = success_rate, 1 - success_rate
    return p * q**2 * (p**num_rollouts * q + q**num_rollouts * p)


def useful_rollouts(success_rate: float) -> int:
    """Rollouts after which both outcomes were probably seen, for 0 < p < 1: int(min(128, ln 0.1 / ln max(p, 1-p)))."""
    return int(min(MAX_ROLLOUTS, math.log(MISS_PROBABILITY) / math.log(max(success_rate, 1 - success_rate))))


def allocate_rollouts(queries: Sequence[QueryHistory], mean_group_size: int) -> dict[str, int]:
    """Group size of each query of a step, by id; they sum to mean_group_size · len(queries).

    *Reading*: a query without history gets mean_group_size out of the budget, the others share what is left.
    Always-wrong and always-right queries get 2; what the rest cannot use (`useful_rollouts`) goes evenly to the
    always-wrong ones, if there are none to the always-right ones. The rest maximises the total `rollout_value` within
    [2, 128]. Ties by query id. A budget that cannot be met within [2, 128] is spread evenly.
    """
    known = sorted((query for query in queries if query.num_judged), key=lambda query: query.query_id)
    sizes = {query.query_id: mean_group_size for query in queries}
    budget = mean_group_size * len(known)
    if MIN_ROLLOUTS * len(known) <= budget <= MAX_ROLLOUTS * len(known):
        sizes |= _solve(known, budget)
    return sizes


def _solve(known: Sequence[QueryHistory], budget: int) -> dict[str, int]:
    rates = {query.query_id: query.num_correct / query.num_judged for query in known}
    always_wrong = [query_id for query_id, rate in rates.items() if rate == 0]
    always_right = [query_id for query_id, rate in rates.items() if rate == 1]
    mixed = {query_id: rate for query_id, rate in rates.items() if 0 < rate < 1}

    useful = sum(useful_rollouts(rate) for rate in mixed.values())
    surplus = max(0, budget - MIN_ROLLOUTS * (len(rates) - len(mixed)) - useful)
    sizes = _spread(always_wrong, surplus)
    surplus -= sum(sizes.values()) - MIN_ROLLOUTS * len(sizes)
    sizes |= _spread(always_right, surplus)
    return sizes | _greedy(mixed, budget - sum(sizes.values()))


def _spread(query_ids: Sequence[str], surplus: int) -> dict[str, int]:
    """The minimum for each and the surplus evenly on top, the first ids one more, as far as the maximum allows."""
    if not query_ids:
        return {}
    each, extra = divmod(surplus, len(query_ids))
    return {
        query_id: min(MAX_ROLLOUTS, MIN_ROLLOUTS + each + (index < extra)) for index, query_id in enumerate(query_ids)
    }


def _greedy(success_rates: dict[str, float], budget: int) -> dict[str, int]:
    sizes = dict.fromkeys(success_rates, MIN_ROLLOUTS)
    heap = [(-marginal_value(MIN_ROLLOUTS, rate), query_id) for query_id, rate in success_rates.items()]
    heapq.heapify(heap)
    for _ in range(budget - MIN_ROLLOUTS * len(sizes)):
        _, query_id = heap[0]
        sizes[query_id] += 1
        if sizes[query_id] == MAX_ROLLOUTS:
            heapq.heappop(heap)
        else:
            heapq.heapreplace(heap, (-marginal_value(sizes[query_id], success_rates[query_id]), query_id))
    return sizes
