"""Judged groups -> packed micro-batches of one fixed shape.

Sequences (prompt and completion) are packed into rows by first-fit decreasing; a row's sequences are told apart by
segment ids. Every micro-batch has the same shape whatever the group size, so a step of G = 8 is more of them, not a new
program.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, cast

import chex
import jax
import numpy as np

from sgpo_jax.types import UserError

Row = list[tuple[int, "TrainSequence"]]
"""The sequences of one row, with their numbers in the step."""


@dataclass(frozen=True, slots=True)
class TrainSequence:
    """One rollout as the update sees it. `advantage` was computed over its whole group.

    is_trained: False leaves the rollout without loss.
    """

    prompt_ids_P: Sequence[int] | np.ndarray
    completion_ids_C: np.ndarray
    sampler_logprobs_C: np.ndarray
    advantage: float
    group_id: int
    is_trained: bool = True

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids_P) + len(self.completion_ids_C)

    @property
    def num_loss_tokens(self) -> int:
        return len(self.completion_ids_C) if self.is_trained else 0


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Batch:
    """One micro-batch: B rows of T token slots, several sequences a row.

    segment_ids_BT: 0 where a slot is empty, else the sequence's number in its row, from 1.
    positions_BT: place of the token in its own sequence.
    loss_mask_BT: True on the completion tokens that are trained, the stop token included.
    advantages_BT, sampler_logprobs_BT: 0 outside the completions. old_logprobs_BT: None with one update a step.
    ref_logprobs_BT: of the frozen reference; None where the loss has no KL term.
    sequence_ids_BT, group_ids_BT: numbers unique in the step; -1 where a slot is empty.
    num_loss_tokens, num_sequences: of the whole optimizer update, the denominators of the loss (float32 scalars).
    `pack` fills it with NumPy arrays, which every jitted function takes for JAX's.
    """

    token_ids_BT: jax.Array
    positions_BT: jax.Array
    segment_ids_BT: jax.Array
    loss_mask_BT: jax.Array
    advantages_BT: jax.Array
    sampler_logprobs_BT: jax.Array
    sequence_ids_BT: jax.Array
    group_ids_BT: jax.Array
    num_loss_tokens: jax.Array
    num_sequences: jax.Array
    old_logprobs_BT: jax.Array | None = None
    ref_logprobs_BT: jax.Array | None = None


@dataclass(frozen=True, slots=True)
class BatchShape:
    """num_rows B and row_length T of the compiled micro-batch."""

    num_rows: int
    row_length: int


def batch_shape(
    longest_prompt: int, max_completion_tokens: int, micro_batch_tokens: int, row_multiple: int
) -> BatchShape:
    """The one shape of a run: rows that hold the longest sequence, as many as fit in micro_batch_tokens.

    row_multiple: how many devices share the rows; at least that many rows, and a multiple of it.
    """
    row_length = _round_up(longest_prompt + max_completion_tokens, 8)
    num_rows = max(1, micro_batch_tokens // (row_length * row_multiple)) * row_multiple
    return BatchShape(num_rows=num_rows, row_length=row_length)


def pack(sequences: Sequence[TrainSequence], shape: BatchShape, left_out: Sequence[TrainSequence] = ()) -> list[Batch]:
    """All sequences of one optimizer update as micro-batches (NumPy); the last one is filled with empty rows.

    left_out: sequences of the update that have no gradient and need no pass; they count in the denominators.
    Raises UserError for a sequence longer than a row.
    """
    rows = _first_fit_decreasing([s.num_tokens for s in sequences], shape.row_length)
    totals = {
        "num_loss_tokens": np.float32(sum(s.num_loss_tokens for s in (*sequences, *left_out))),
        "num_sequences": np.float32(sum(s.is_trained for s in (*sequences, *left_out))),
    }
    return [
        _micro_batch([[(i, sequences[i]) for i in row] for row in rows[start : start + shape.num_rows]], shape, totals)
        for start in range(0, len(rows), shape.num_rows)
    ]


def to_arrays(batches: Sequence[Batch]) -> dict[str, jax.Array]:
    """Every array of the batches under a name of its own; `from_arrays` makes batches of them again."""
    values = ((i, field.name, getattr(batch, field.name)) for i, batch in enumerate(batches) for field in fields(batch))
    return {f"{i}.{name}": value for i, name, value in values if value is not None}


def from_arrays(arrays: Mapping[str, Any]) -> list[Batch]:
    """The inverse of `to_arrays`."""
    parts: dict[int, dict[str, Any]] = {}
    for key, value in arrays.items():
        number, _, name = key.partition(".")
        parts.setdefault(int(number), {})[name] = value
    return [Batch(**parts[number]) for number in sorted(parts)]


def padding_frac(batches: Sequence[Batch]) -> float:
    """Share of the token slots that carry no token."""
    return 1.0 - float(np.mean([np.mean(np.asarray(b.segment_ids_BT) > 0) for b in batches])) if batches else 0.0


def completions_of(
    sequences: Sequence[TrainSequence], batches: Sequence[Batch], values: Sequence[jax.Array]
) -> list[np.ndarray]:
    """What `values`, [B, T] for each of the batches that `sequences` were packed into, hold for each completion."""
    found: dict[int, np.ndarray] = {}
    for batch, values_BT in zip(batches, values, strict=True):
        ids_BT, host_BT = np.asarray(batch.sequence_ids_BT), np.asarray(values_BT)
        for number in np.unique(ids_BT[ids_BT >= 0]):
            found[int(number)] = host_BT[ids_BT == number]  # in order: a sequence lies in one row
    return [found[i][len(sequence.prompt_ids_P) :] for i, sequence in enumerate(sequences)]


def with_old_logprobs(batch: Batch, old_logprobs_BT: jax.Array) -> Batch:
    chex.assert_equal_shape([batch.token_ids_BT, old_logprobs_BT])
    return replace(batch, old_logprobs_BT=old_logprobs_BT)


def with_ref_logprobs(batch: Batch, ref_logprobs_BT: jax.Array) -> Batch:
    chex.assert_equal_shape([batch.token_ids_BT, ref_logprobs_BT])
    return replace(batch, ref_logprobs_BT=ref_logprobs_BT)


def _first_fit_decreasing(lengths: Sequence[int], row_length: int) -> list[list[int]]:
    """Indices of the sequences in each row. Deterministic: longest first, ties by index."""
    rows: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[index]
        if length > row_length:
            raise UserError(
                f"a sequence of {length} tokens does not fit in rows of {row_length}; raise data.max_prompt_tokens"
            )
        row = next((r for r, free in enumerate(room) if free >= length), None)
        if row is None:
            rows.append([])
            room.append(row_length)
            row = len(rows) - 1
        rows[row].append(index)
        room[row] -= length
    return rows


def _micro_batch(rows: Sequence[Row], shape: BatchShape, totals: dict[str, np.float32]) -> Batch:
    size = (shape.num_rows, shape.row_length)
    arrays = {
        "token_ids_BT": np.zeros(size, np.int32),
        "positions_BT": np.zeros(size, np.int32),
        "segment_ids_BT": np.zeros(size, np.int32),
        "loss_mask_BT": np.zeros(size, bool),
        "advantages_BT": np.zeros(size, np.float32),
        "sampler_logprobs_BT": np.zeros(size, np.float32),
        "sequence_ids_BT": np.full(size, -1, np.int32),
        "group_ids_BT": np.full(size, -1, np.int32),
    }
    for number, row in enumerate(rows):
        _fill_row({name: array[number] for name, array in arrays.items()}, row)
    return Batch(**cast("dict[str, jax.Array]", {**arrays, **totals}))


def _fill_row(slots: dict[str, np.ndarray], row: Row) -> None:
    start = 0
    for segment, (index, sequence) in enumerate(row, start=1):
        completion = start + len(sequence.prompt_ids_P)
        end = start + sequence.num_tokens
        slots["token_ids_BT"][start:completion] = sequence.prompt_ids_P
        slots["token_ids_BT"][completion:end] = sequence.completion_ids_C
        slots["positions_BT"][start:end] = np.arange(end - start)
        slots["segment_ids_BT"][start:end] = segment
        slots["loss_mask_BT"][completion:end] = sequence.is_trained
        slots["advantages_BT"][completion:end] = sequence.advantage
        slots["sampler_logprobs_BT"][completion:end] = sequence.sampler_logprobs_C
        slots["sequence_ids_BT"][start:end] = index
        slots["group_ids_BT"][start:end] = sequence.group_id
        start = end


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
