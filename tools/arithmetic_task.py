"""The demo's task: expressions such as 23+8*3, worked out from left to right, every total modulo 100.

A question ends with "="; a demonstration copies each operation and gives the running total after ":", "$" ends it:

    23+8*3=   ->   +8:31*3:93$

Known operations are + and - with 1..9, and * with 2..4. A hard expression has one operation in *6..*9, which no
demonstration shows. Demonstrations can be noisy, so that reinforcement learning has something to put right.
All functions are pure but for the NumPy generator that they draw from.
"""

from collections.abc import Iterator, Set
from dataclasses import dataclass
from typing import Any

import numpy as np

MODULUS = 100
MAX_DEPTH = 6
MAX_PROMPT_CHARS = 2 + 2 * MAX_DEPTH + 1  # start, operations, "="
MAX_COMPLETION_CHARS = 5 * MAX_DEPTH + 1  # operation, ":", total; "$"
ALPHABET = "0123456789+-*=:$"
MAX_TRIES = 10_000  # at finding an expression that is new

_TIMES_PROBABILITY = 0.2
_KNOWN_FACTORS = (2, 3, 4)
_HARD_FACTORS = (6, 7, 8, 9)

Weights = tuple[float, float, float, float, float, float]  # of depths 1..6, need not sum to 1


@dataclass(frozen=True, slots=True)
class Operation:
    symbol: str
    operand: int

    def apply(self, value: int) -> int:
        results = {"+": value + self.operand, "-": value - self.operand, "*": value * self.operand}
        return results[self.symbol] % MODULUS

    def __str__(self) -> str:
        return f"{self.symbol}{self.operand}"


@dataclass(frozen=True, slots=True)
class Expression:
    """start is in 10..99; depth is the number of operations."""

    start: int
    operations: tuple[Operation, ...]

    @property
    def depth(self) -> int:
        return len(self.operations)

    @property
    def is_hard(self) -> bool:
        return any(op.symbol == "*" and op.operand in _HARD_FACTORS for op in self.operations)

    @property
    def question(self) -> str:
        return f"{self.start}{''.join(map(str, self.operations))}="

    @property
    def answer(self) -> int:
        value = self.start
        for operation in self.operations:
            value = operation.apply(value)
        return value


@dataclass(frozen=True, slots=True)
class Style:
    """How demonstrations are written.

    slips: share of totals that are wrong (and carried on with).
    direct: share of demonstrations that name only the answer.
    merged: share of operations, the last one left out, whose total is skipped: "+8*3:93$".
    """

    slips: float
    direct: float
    merged: float
    depth_weights: Weights


@dataclass(frozen=True, slots=True)
class QueryMix:
    """Which questions are asked. hard_frac of them are hard, their depths drawn by hard_depth_weights."""

    hard_frac: float
    hard_depth_weights: Weights
    depth_weights: Weights


CAREFUL = Style(slips=0.06, direct=0.12, merged=0.15, depth_weights=(2, 2, 1, 1, 1, 1))
SLOPPY = Style(slips=0.04, direct=0.25, merged=0.28, depth_weights=(1, 1, 1, 1, 1, 1))

_DEPTHS: Weights = (0.18, 0.20, 0.20, 0.18, 0.14, 0.10)
HARD_WHEN_DEEP = QueryMix(hard_frac=0.28, hard_depth_weights=(0, 0, 1, 1, 1, 1), depth_weights=_DEPTHS)
HARD_ANYWHERE = QueryMix(hard_frac=0.38, hard_depth_weights=_DEPTHS, depth_weights=_DEPTHS)


def draw_expression(rng: np.random.Generator, depth: int, *, is_hard: bool) -> Expression:
    """A start in 10..99 and `depth` known operations, one of them, anywhere, replaced by a hard one if is_hard."""
    operations = [_draw_operation(rng) for _ in range(depth)]
    if is_hard:
        operations[rng.integers(depth)] = Operation("*", int(rng.choice(_HARD_FACTORS)))
    return Expression(int(rng.integers(10, MODULUS)), tuple(operations))


def draw_queries(
    rng: np.random.Generator, mix: QueryMix, count: int, *, exclude: Set[Expression] = frozenset()
) -> list[Expression]:
    """`count` different expressions, none of them in `exclude`.

    Raises ValueError where there are too few of a depth, so that none new is found.
    """
    taken = set(exclude)
    queries: list[Expression] = []
    for _ in range(count):
        is_hard = bool(rng.random() < mix.hard_frac)
        depth = _draw_depth(rng, mix.hard_depth_weights if is_hard else mix.depth_weights)
        # Depth and kind stay while one is found: shares are the mix's, even where a depth is nearly used up.
        tries = (draw_expression(rng, depth, is_hard=is_hard) for _ in range(MAX_TRIES))
        expression = next((found for found in tries if found not in taken), None)
        if expression is None:
            raise ValueError(f"no new expression of depth {depth} found; {count} are too many")
        taken.add(expression)
        queries.append(expression)
    return queries


def draw_demonstrations(
    rng: np.random.Generator, style: Style, *, exclude: Set[Expression] = frozenset()
) -> Iterator[tuple[Expression, str]]:
    """Endless pairs of an expression of known operations and a demonstration of it; repeats happen."""
    while True:
        expression = draw_expression(rng, _draw_depth(rng, style.depth_weights), is_hard=False)
        if expression not in exclude:
            yield expression, demonstrate(rng, expression, style)


def demonstrate(rng: np.random.Generator, expression: Expression, style: Style) -> str:
    """One demonstration in this style; the true one where the style is free of noise."""
    if rng.random() < style.direct:
        return f":{expression.answer}$"
    text, value = "", expression.start
    for place, operation in enumerate(expression.operations, start=1):
        value = operation.apply(value)
        text += str(operation)
        if place < expression.depth and rng.random() < style.merged:
            continue
        if rng.random() < style.slips:
            value = (value + int(rng.integers(1, MODULUS))) % MODULUS
        text += f":{value}"
    return f"{text}$"


def is_solved(expression: Expression, completion: str) -> bool:
    """Whether the text after the last ":" is the answer and "$" ends it: what the verifier of question_row decides."""
    return ":" in completion and completion.rpartition(":")[2] == f"{expression.answer}$"


def question_row(expression: Expression) -> dict[str, Any]:
    """A line of a question file. The `exact` verifier compares what stands between the last ":" and the final "$"."""
    return {
        "question": expression.question,
        "answer": str(expression.answer),
        "kind": "exact",
        "metadata": {"answer_after": ":", "answer_end": "$"},
    }


def _draw_operation(rng: np.random.Generator) -> Operation:
    if rng.random() < _TIMES_PROBABILITY:
        return Operation("*", int(rng.choice(_KNOWN_FACTORS)))
    return Operation("+-"[rng.integers(2)], int(rng.integers(1, 10)))


def _draw_depth(rng: np.random.Generator, weights: Weights) -> int:
    return 1 + int(rng.choice(MAX_DEPTH, p=np.array(weights) / sum(weights)))
