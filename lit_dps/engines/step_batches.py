"""The batches of the steps of a stack, whose rows may have batches of different sizes.

The last batch of an epoch may be short. Rows that began at different validations have it in
different steps. Such a step computes the rows of each batch size together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import takewhile
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Steps that are captured as one graph where an interval has several batch sizes. The numbers of
# steps between two short batches vary, and each number would need another graph.
PART_LENGTHS = (16, 4, 1)
# The batches of a row: (steps, batch), or a tensor for each step if they differ in size.
RowBatches = Tensor | tuple[Tensor, ...]


class MixedBatch(NamedTuple):
    """The batch of a step in which the rows of a stack have batches of different sizes.

    Attributes:
        parts: For each batch size the rows that have it, and their examples: shapes (rows,) and
            (rows, batch).
    """

    parts: tuple[tuple[Tensor, Tensor], ...]

    def to(self, device: torch.device) -> MixedBatch:
        """Return the batch with its tensors on a device."""
        parts = [(rows.to(device), examples.to(device)) for rows, examples in self.parts]
        return MixedBatch(tuple(parts))


# The batches of a stack: (steps, batch), or (steps, rows, batch) if rows differ, or a batch for
# each step: (batch,), (rows, batch) or a `MixedBatch`.
StackBatches = Tensor | tuple[Tensor | MixedBatch, ...]


def count_examples(batches: RowBatches) -> int:
    """Return the number of examples of all steps of a row."""
    if isinstance(batches, Tensor):
        return batches.numel()
    return sum(map(len, batches))


def join_rows(batches: Mapping[int, RowBatches], rows: int) -> StackBatches:
    """Return the batches of all rows of a stack.

    Args:
        batches: The batches of the live rows, all of the same number of steps.
        rows: Rows of the stack. Networks of empty rows are trained too, and their results ignored.
    """
    of_rows = list(batches.values())
    first = of_rows[0]
    if all(_are_equal(first, other) for other in of_rows[1:]):
        return first
    shapes = {of_row.shape if isinstance(of_row, Tensor) else None for of_row in of_rows}
    if isinstance(first, Tensor) and len(shapes) == 1:
        filled: list[Tensor] = [batches.get(row, first) for row in range(rows)]  # pyright: ignore
        return torch.stack(filled, dim=1)
    by_step = {row: tuple(of_row) for row, of_row in batches.items()}
    steps = []
    for step in range(len(first)):
        of_step = {row: of_row[step] for row, of_row in by_step.items()}
        steps.append(_join_step(of_step, rows))
    return tuple(steps)


def _are_equal(ours: RowBatches, theirs: RowBatches) -> bool:
    """Return True if two rows have the same examples in each step."""
    if isinstance(ours, Tensor) and isinstance(theirs, Tensor):
        return torch.equal(ours, theirs)
    return all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))


def _join_step(batches: Mapping[int, Tensor], rows: int) -> Tensor | MixedBatch:
    """Return the batch of a step from the batches of the live rows, each of shape (batch,)."""
    rows_by_size: dict[int, list[int]] = {}
    for row, batch in batches.items():
        rows_by_size.setdefault(len(batch), []).append(row)
    if len(rows_by_size) == 1:
        first = next(iter(batches.values()))
        return torch.stack([batches.get(row, first) for row in range(rows)])
    parts = []
    for of_size in rows_by_size.values():
        examples = torch.stack([batches[row] for row in of_size])
        parts.append((torch.tensor(of_size), examples))
    return MixedBatch(tuple(parts))


def _has_shape(shape: torch.Size, batch: Tensor | MixedBatch) -> bool:
    return isinstance(batch, Tensor) and batch.shape == shape


def parts_of(
    steps: Sequence[Tensor | MixedBatch], device: torch.device
) -> Iterator[Tensor | MixedBatch]:
    """Yield steps with batches of one shape as one tensor, and the other steps one at a time.

    A tensor has one of `PART_LENGTHS` as its number of steps.
    """
    start = 0
    while start < len(steps):
        first = steps[start]
        if isinstance(first, MixedBatch):
            yield first.to(device)
            start += 1
            continue
        same: list[Any] = list(takewhile(partial(_has_shape, first.shape), steps[start:]))
        length = next(length for length in PART_LENGTHS if length <= len(same))
        yield torch.stack(same[:length]).to(device)
        start += length
