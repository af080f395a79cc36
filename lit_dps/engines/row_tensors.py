"""The tensors of the rows of a stack, and the numbers of their steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lit_dps.engines.network_run import NetworkRun


class Rows(NamedTuple):
    """The tensors of a network in a stack. In the stack, rows are their first dimension.

    Attributes:
        weights: Trained parameters, flat: shape (parameters,).
        keep: 1 for kept and 0 for pruned parameters: shape (parameters,).
        hyperparameters: Hyperparameters of the update rule by name, each of shape (1,).
        state: Tensors of the optimizer by name, flat; each of shape (parameters,) unless the rule
            has a state of another shape.
        buffers: Buffers and untrained parameters, by name.
        delayed: Gradients that are not applied yet, shape (delay, parameters). The gradient of a
            step is at index step modulo delay.
    """

    weights: Tensor
    keep: Tensor
    hyperparameters: dict[str, Tensor]
    state: dict[str, Tensor]
    buffers: dict[str, Tensor]
    delayed: Tensor


class StepNumbers(NamedTuple):
    """Numbers of each step of all rows, on their device. The first dimension is of steps.

    Attributes:
        rates: Learning rates, shape (steps, rows, 1).
        updates: The number of the update that each step makes, from 1, shape (steps, rows, 1).
        places: Where the gradients of a step are delayed, shape (steps, rows).
    """

    rates: Tensor
    updates: Tensor
    places: Tensor

    def at(self, step: int) -> StepNumbers:
        """Return the numbers of one step, without the dimension of steps."""
        return StepNumbers(self.rates[step], self.updates[step], self.places[step])

    def between(self, first: int, end: int) -> StepNumbers:
        """Return the numbers of some of the steps."""
        steps = slice(first, end)
        return StepNumbers(self.rates[steps], self.updates[steps], self.places[steps])

    @classmethod
    def of(
        cls, runs: Sequence[NetworkRun | None], first: int, steps: int, weights: Tensor
    ) -> StepNumbers:
        """Return the numbers of the next steps; a row without a run has a rate of 0.

        Args:
            runs: The run of each row.
            first: Steps from the last check to the first of these steps.
            steps: How many steps.
            weights: The weights of the rows, whose type and device the rates get.
        """
        rates = np.zeros((steps, len(runs), 1))
        updates = np.ones((steps, len(runs), 1))
        places = np.zeros((steps, len(runs)), dtype=np.int64)
        for row, run in enumerate(runs):
            if run is None:
                continue
            of_row = np.arange(steps) + run.steps + first
            updates[:, row, 0] = np.maximum(of_row - run.delay, 0) + 1
            if run.delay:
                places[:, row] = of_row % run.delay
            # A row may be trained beyond its end, where its schedule may have no rate.
            last = run.attempt.goal.max_steps - 1
            for i, step in enumerate(of_row.tolist()):
                # The first delayed gradient is applied after `delay` steps.
                if step >= run.delay:
                    rates[i, row, 0] = run.learning_rate(min(step, last))
        return cls(
            torch.from_numpy(rates).to(weights),
            torch.from_numpy(updates).to(weights),
            torch.from_numpy(places).to(weights.device),
        )


def exchange(delayed: Tensor, gradients: Tensor, places: Tensor) -> Tensor:
    """Store new gradients, and return the delayed ones that are due; zeros if none is due yet.

    Args:
        delayed: Shape (rows, delay, parameters); changed in place.
        gradients: Shape (rows, parameters).
        places: The place of each row's gradients in `delayed`, shape (rows,).
    """
    rows = torch.arange(len(places), device=delayed.device)
    due = delayed[rows, places]
    delayed[rows, places] = gradients
    return due
