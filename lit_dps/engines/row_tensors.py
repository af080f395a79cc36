"""The tensors of the rows of a stack, and the numbers of their steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from lit_dps.engines.network_run import NetworkRun
from lit_dps.optim import StackedUpdate, rule_of
from lit_dps.optim.delay import DELAY_STATE_KEY
from lit_dps.optim.parameter_groups import names_of_groups, parameters_of, trained_by_name
from lit_dps.optim.weight_average import type_of_average


class Rows(NamedTuple):
    """The tensors of a network in a stack. In the stack, rows are their first dimension.

    Attributes:
        weights: Trained parameters, flat: shape (parameters,).
        mask: 1 for kept and 0 for pruned parameters: shape (parameters,).
        hyperparameters: Hyperparameters of the update rule by name, each of shape (groups,), with a
            number for each parameter group.
        state: Tensors of the optimizer by name, flat; each of shape (parameters,) unless the rule
            has a state of another shape.
        buffers: Buffers and untrained parameters, by name.
        delayed: Gradients that are not applied yet, shape (delay, parameters). The gradient of a
            step is at index step modulo delay.
        average: The average of the weights that is validated, shape (parameters,), of
            `type_of_average`; empty if the weights are validated.
        average_buffers: The average of the floating-point buffers, by name.
        half_life: The half-life of the average in examples, shape (1,); 0 without one.
    """

    weights: Tensor
    mask: Tensor
    hyperparameters: dict[str, Tensor]
    state: dict[str, Tensor]
    buffers: dict[str, Tensor]
    delayed: Tensor
    average: Tensor
    average_buffers: dict[str, Tensor]
    half_life: Tensor

    @property
    def validated_weights(self) -> Tensor:
        """The weights that are validated."""
        if self.average.shape[-1]:
            return self.average.to(self.weights.dtype)
        return self.weights

    @property
    def validated_buffers(self) -> dict[str, Tensor]:
        """The buffers that are validated, by name."""
        buffers = dict(self.buffers)
        for name, average in self.average_buffers.items():
            buffers[name] = average.to(buffers[name].dtype)
        return buffers

    def update_average(self, examples: Tensor) -> None:
        """Move the averages of all rows towards their weights after a step.

        Args:
            examples: The examples of each row's batch, shape (rows, 1).
        """
        if not self.average.shape[-1]:
            return
        half_lives = examples.to(self.half_life.dtype) / self.half_life
        share = -torch.expm1(-math.log(2) * half_lives)
        self.average.add_((self.weights - self.average) * share)
        for name, average in self.average_buffers.items():
            share_of_rows = share.view(-1, *(1,) * (average.ndim - 1))
            average.add_((self.buffers[name] - average) * share_of_rows)


class StepNumbers(NamedTuple):
    """Numbers of each step of all rows, on their device. The first dimension is of steps.

    Attributes:
        rates: Learning rates of the parameter groups, shape (steps, rows, groups).
        updates: The number of the update that each step makes, from 1, shape (steps, rows, 1).
        places: Where the gradients of a step are delayed, shape (steps, rows).
    """

    rates: Tensor
    updates: Tensor
    places: Tensor

    def at(self, step: int | slice) -> StepNumbers:
        """Return the numbers of one step, without the dimension of steps, or of some steps."""
        return StepNumbers(self.rates[step], self.updates[step], self.places[step])

    @classmethod
    def of(
        cls, runs: Sequence[NetworkRun | None], first: int, steps: int, weights: Tensor
    ) -> StepNumbers:
        """Return the numbers of the next steps; a row without a run has a rate of 0.

        Args:
            runs: The run of each row.
            first: Steps from the last validation to the first of these steps.
            steps: How many steps.
            weights: The weights of the rows, whose type and device the rates get.
        """
        groups = max(len(run.optimizer.param_groups) for run in runs if run is not None)
        rates = np.zeros((steps, len(runs), groups))
        # Not 1 in a row without a run: a first update may cost more, as the first basis of SOAP.
        updates = np.full((steps, len(runs), 1), 2.0)
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
                    rates[i, row] = run.applied_rates(min(step, last))
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


class RowConverter:
    """Converts the state of runs into the tensors of rows, and back.

    Args:
        first: A run. The others have its parameters, its update rule and its parameter groups.

    Attributes:
        update: The update of the rule.
        layout: The places of the trained parameters in a flat tensor.
    """

    def __init__(self, first: NetworkRun):
        rule = rule_of(first.optimizer)
        assert rule is not None
        trained = trained_by_name(first.module)
        self.update = StackedUpdate(rule, trained, names_of_groups(first.optimizer, trained))
        self.layout = self.update.weights

    def rows_of(self, run: NetworkRun) -> Rows:
        """Return the tensors of a run."""
        parameters = dict(run.module.named_parameters())
        trained = {name: parameters[name] for name in self.layout.shapes}
        buffers = dict(run.module.named_buffers())
        for name, parameter in parameters.items():
            if name not in trained:
                buffers[name] = parameter.detach()
        weights = self.layout.flatten(trained).detach()
        mask = self.mask_of(run, trained)
        hyperparameters = {}
        for name, numbers in self.update.rule.numbers_of(run.optimizer).items():
            hyperparameters[name] = weights.new_tensor(numbers)
        state = self.update.flat_state(trained, run.optimizer.state)
        delayed = self._delayed_of(run, parameters, weights)
        average = weights.new_zeros(0)
        average_buffers = {}
        half_life = weights.new_zeros(1, dtype=type_of_average(weights))
        if run.average is not None:
            half_life.fill_(run.average.half_life)
            average = self.layout.flatten(run.average.tensors)
            for name, tensor in run.average.tensors.items():
                if name not in trained:
                    average_buffers[name] = tensor.clone()
        return Rows(
            weights,
            mask,
            hyperparameters,
            state,
            buffers,
            delayed,
            average,
            average_buffers,
            half_life,
        )

    def _delayed_of(
        self, run: NetworkRun, parameters: Mapping[str, Tensor], weights: Tensor
    ) -> Tensor:
        """Return the delayed gradients of a run, with the type of its weights."""
        positions = {id(p): i for i, p in enumerate(parameters_of(run.optimizer))}
        optimizer_state: Any = run.optimizer.state
        saved = optimizer_state.get(DELAY_STATE_KEY, [])
        delayed = weights.new_zeros(run.delay, self.layout.size)
        for step, gradients in enumerate(saved, start=run.steps - len(saved)):
            parts = {}
            for name in self.layout.shapes:
                gradient = gradients[positions[id(parameters[name])]]
                if gradient is None:
                    gradient = torch.zeros_like(parameters[name])
                parts[name] = gradient
            delayed[step % run.delay] = self.layout.flatten(parts)
        return delayed

    def mask_of(self, run: NetworkRun, parameters: Mapping[str, Tensor]) -> Tensor:
        """Return 1 for each kept and 0 for each pruned parameter, shape (parameters,)."""
        masks = {}
        for name in self.layout.shapes:
            if run.mask is not None and name in run.mask:
                masks[name] = run.mask[name].to(parameters[name])
            else:
                masks[name] = torch.ones_like(parameters[name].detach())
        return self.layout.flatten(masks)

    def write_back(self, run: NetworkRun, tensors: Rows, place: int) -> None:
        """Copy the state at a place of row tensors into the module, optimizer and schedule."""
        parameters = dict(run.module.named_parameters())
        self.copy_weights(run.module, tensors, place)
        if run.average is not None:
            average = dict(self.layout.split(tensors.average[place]))
            for name, buffers in tensors.average_buffers.items():
                average[name] = buffers[place]
            run.average.load(average)
        for key, layout in self.update.state.items():
            for name, part in layout.split(tensors.state[key][place]).items():
                run.optimizer.state[parameters[name]][key] = part.clone()
        if self.update.rule.has_step_counter:
            # The optimizer makes no update before the first delayed gradient.
            updates = max(run.steps - run.delay, 0)
            for name in self.layout.shapes:
                run.optimizer.state[parameters[name]]["step"] = torch.tensor(float(updates))
        if run.delay:
            optimizer_state: Any = run.optimizer.state
            optimizer_state[DELAY_STATE_KEY] = self._delayed_gradients(
                run, tensors.delayed[place], parameters
            )
        rates = run.learning_rates(run.steps)
        for group, rate in zip(run.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        # A table of rates begins with a new schedule again when the run is resumed.
        if run.schedule is not None and run.rates is None:
            run.schedule.last_epoch = run.steps
            run.schedule._last_lr = list(rates)
            run.schedule._step_count = run.steps + 1

    def copy_weights(self, module: nn.Module, tensors: Rows, place: int) -> None:
        """Copy weights and buffers at a place of row tensors into a module."""
        parameters = dict(module.named_parameters())
        with torch.no_grad():
            for name, weights in self.layout.split(tensors.weights[place]).items():
                parameters[name].copy_(weights)
            # Buffers, and untrained parameters, which a training step may change.
            others = parameters | dict(module.named_buffers())
            for name, values in tensors.buffers.items():
                others[name].copy_(values[place])

    def _delayed_gradients(
        self, run: NetworkRun, delayed: Tensor, parameters: Mapping[str, Tensor]
    ) -> list[list[Tensor | None]]:
        """Return the delayed gradients of a run as `delay_gradients` keeps them, oldest first.

        Args:
            run: The run.
            delayed: Its delayed gradients, shape (delay, parameters).
            parameters: The parameters of its module by name.
        """
        names = {id(parameter): name for name, parameter in parameters.items()}
        steps = []
        for step in range(max(0, run.steps - run.delay), run.steps):
            parts = self.layout.split(delayed[step % run.delay].clone())
            order = parameters_of(run.optimizer)
            steps.append([parts.get(names[id(parameter)]) for parameter in order])
        return steps
