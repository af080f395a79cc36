"""Snapshots: the rows of a stack as they were after some intervals, and their validations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.utils._pytree import tree_map, tree_map_

from lit_dps.engines.functional import Functional
from lit_dps.engines.logged_module import MAX_EVALUATED, metrics_of_rows
from lit_dps.engines.memory import halve_until_fits
from lit_dps.engines.row_tensors import Rows
from lit_dps.optim import FlatLayout
from lit_dps.training.early_validation import CHUNK, evaluating


class Snapshots:
    """The rows of a stack as they were after some intervals, and their validations.

    Args:
        module: The module that computes the values of all rows.
        functional: The same module as a function.
        layout: The places of the weights in a flat tensor.
        tensors: The tensors of the stack.

    Attributes:
        tensors: The rows after the first interval, then after the second, and so on. The index of
            a row among them is its snapshot index.
        microbatch: Examples of a network at a time. It is halved when they do not fit in memory.
    """

    def __init__(
        self, module: nn.Module, functional: Functional, layout: FlatLayout, tensors: Rows
    ):
        self.tensors = tensors
        self.microbatch = CHUNK
        self._module = module
        self._functional = functional
        self._layout = layout

    def store(self, tensors: Rows, interval: int, intervals: int) -> None:
        """Store the rows of a stack as they are after an interval; see `NetworkRows.snapshot`."""
        if intervals == 1:
            self.tensors = tensors  # nothing changes them before the validation
            return
        present = changing_tensors(tensors)
        rows = len(tensors.weights)
        if interval == 0:
            self.tensors = tree_map(
                lambda tensor: tensor.new_empty(intervals * rows, *tensor.shape[1:]), present
            )
        places = slice(interval * rows, (interval + 1) * rows)
        tree_map_(lambda stored, tensor: stored[places].copy_(tensor), self.tensors, present)

    def are_finite(self) -> list[bool]:
        """Return for each row, by its snapshot index, whether all weights are finite."""
        return self.tensors.weights.isfinite().all(1).tolist()

    def per_example_error(self, rows: Tensor, x: Tensor, y: Tensor, index: Tensor) -> Tensor:
        """Return the module's error of each example, shape (rows, examples) like `index`.

        Args:
            rows: Snapshot indices.
            x, y: Images and classes of the validation split.
            index: Examples of each row, shape (rows, examples).

        Raises:
            torch.OutOfMemoryError: If not even one example at a time fits in memory.
        """

        def compute() -> Tensor:
            return torch.cat(self._evaluate("per_example_error", rows, x, y, index), 1)

        return halve_until_fits(compute, self, index.shape[1])

    def losses(self, rows: Tensor, x: Tensor, y: Tensor, index: Tensor) -> Tensor:
        """Return the loss of each row summed over examples: float64, shape (rows,).

        Args:
            rows, x, y, index: As in `per_example_error`.

        Raises:
            torch.OutOfMemoryError: If not even one example at a time fits in memory.
        """

        def compute() -> Tensor:
            parts = self._evaluate("summed_loss", rows, x, y, index)
            return torch.stack([part.double() for part in parts]).sum(0)

        return halve_until_fits(compute, self, index.shape[1])

    def _evaluate(
        self, method: str, rows: Tensor, x: Tensor, y: Tensor, index: Tensor
    ) -> list[Tensor]:
        """Return the values of a method for each part of `microbatch` examples."""
        # A part holds all networks at few examples, or few networks.
        networks = max(1, MAX_EVALUATED // min(self.microbatch, index.shape[1]))
        values = []
        with evaluating(self._module):
            for part in index.split(self.microbatch, 1):
                of_rows = []
                for some, examples in zip(rows.split(networks), part.split(networks), strict=True):
                    of_rows.append(self._evaluate_rows(method, some, x[examples], y[examples]))
                values.append(torch.cat(of_rows))
        return values

    def _evaluate_rows(self, method: str, rows: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """Return the values of a method for some rows, each with a batch of its own."""
        call = vmap(lambda tensors, x, y: self._functional.call(method, tensors, (x, y)))
        return call(self._tensors_of(rows), x, y)

    def _tensors_of(self, rows: Tensor) -> dict[str, Tensor]:
        """Return the parameters and buffers of some rows, by name."""
        tensors = dict(self._layout.split(self.tensors.validated_weights[rows]))
        for name, buffer in self.tensors.validated_buffers.items():
            tensors[name] = buffer[rows]
        return tensors

    def logged_metrics(
        self, rows: Tensor, batches: Sequence[Any], names: Sequence[str]
    ) -> Mapping[str, Tensor]:
        """Return the means of metrics that `validation_step` logs, by name: float64, shape (rows,).

        Args:
            rows: Snapshot indices.
            batches: All batches of the validation split.
            names: The metrics.
        """
        with evaluating(self._module):
            return metrics_of_rows(
                self._functional, self._tensors_of, rows, list(enumerate(batches)), names
            )


def changing_tensors(tensors: Rows) -> Rows:
    """Return the tensors that training changes; the others are empty."""
    nothing = tensors.mask.new_empty(len(tensors.mask), 0)
    return tensors._replace(mask=nothing, hyperparameters={})
