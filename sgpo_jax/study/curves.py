"""Accuracy against cumulative FLOPs, and what is read off it. Pure: arrays in, numbers out.

A curve is linear between its evaluations. Before its start it has its first accuracy (the profile is spent, nothing is
trained), after its end its last one (the run is over).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Curve:
    """flops_N: float64, FLOPs spent before each evaluation, never falling. accuracy_N: float64 in [0, 1]."""

    flops_N: np.ndarray
    accuracy_N: np.ndarray

    def at(self, flops: float) -> float:
        """The accuracy at a budget."""
        return float(np.interp(flops, self.flops_N, self.accuracy_N))

    def stays_above(self, target: float) -> float | None:
        """FLOPs from which on the curve is never below the target again; None where it ends below.

        That is where the line from the last evaluation below the target to the next one crosses it. Nothing is
        smoothed: an evaluation that is below by chance counts, so that noise makes this later, never earlier.
        """
        below = np.flatnonzero(self.accuracy_N < target)
        if not len(below):
            return float(self.flops_N[0])
        last = int(below[-1])
        if last == len(self.accuracy_N) - 1:
            return None
        accuracies, flops = self.accuracy_N[last : last + 2], self.flops_N[last : last + 2]
        share = (target - accuracies[0]) / (accuracies[1] - accuracies[0])
        return float(flops[0] + share * (flops[1] - flops[0]))


def mean_curve(curves: Sequence[Curve]) -> Curve:
    """The mean accuracy of several runs at every FLOPs at which one of them was evaluated."""
    flops_N = np.unique(np.concatenate([curve.flops_N for curve in curves]))
    return Curve(flops_N, np.mean(accuracies(curves, flops_N), axis=0))


def accuracies(curves: Sequence[Curve], flops_N: np.ndarray) -> np.ndarray:
    """Each curve's accuracies at common FLOPs, [len(curves), N]."""
    return np.stack([np.interp(flops_N, curve.flops_N, curve.accuracy_N) for curve in curves])
