"""What the fork server does once, so that every worker forked from it starts at once and warm.

The parser builds its tables while it reads (its first formula takes half a second), and SymPy imports lazily.
"""

import sgpo_jax.rewards.worker  # noqa: F401
from sgpo_jax.rewards.math_answers import same_answer

_TYPICAL = [
    (r"\frac{\sqrt{3}}{2}+1", r"1+\sqrt{\frac34}"),
    ("x^2-2x+1", "(x-1)^2"),
    (r"\left(-\infty, \pi\right]", r"x \le \pi"),
    (r"2\cos 30^\circ", r"\sqrt[4]{9}"),
    (r"\binom{5}{2}\cdot 3!", "2(30)"),
    (r"3+4i", r"\log_2 8 - |-4|i"),
    (r"e^{x}\sin x", r"\int x dx"),
]

for gold, answer in _TYPICAL:
    same_answer(gold, answer)
