"""A stack: the networks of many trials as one tensor, trained at the same time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.utils._pytree import tree_leaves, tree_map, tree_map_

from lit_dps.engines.functional import Functional
from lit_dps.engines.logged_module import MAX_EVALUATED, loss_of_pair, metrics_of_rows
from lit_dps.engines.matrix_products import ConvolutionsAsProducts
from lit_dps.engines.memory import WHOLE_BATCHES, halve_until_fits
from lit_dps.engines.network_run import NetworkRun
from lit_dps.engines.row_tensors import Rows, StepNumbers, exchange
from lit_dps.engines.stack_check import trains_on_whole_batches
from lit_dps.optim import OURS, FlatLayout, Rule, StackedUpdate, rule_of
from lit_dps.optim.delay import DELAY_STATE_KEY
from lit_dps.training.early_check import CHUNK, evaluating

# Examples that fill a device. More at a time are not faster and need more memory.
MICROBATCH = 256
# Examples at a time up to which convolutions on a GPU are matrix products. They are 3.6 times as
# fast as cuDNN's grouped convolutions at 2 examples, 2.1 times at 16 and 1.1 times at 256 (forward
# and backward, 100 networks of Simple-CNN, H200, 2026-11-26).
MATMUL_LIMIT = 64


class StackedNetworks:
    """Networks of one architecture under one update rule, trained at the same time.

    The networks differ in weights, mask, learning rate and hyperparameters. `torch.vmap` calls
    `loss` and `per_example_error` of the module over the first dimension of the stacked parameters,
    so that the module does not need to support stacks.

    Args:
        runs: The runs, one a row. The module of the first run computes the losses of all rows,
            with the weights of each row.
        microbatch: Examples of a batch that are computed at a time. The gradients of the parts of a
            larger batch are added. Batches of modules with buffers are not divided.
        matmul_limit: Examples at a time up to which convolutions are matrix products; by default
            `MATMUL_LIMIT` on a GPU and 0 on a CPU.

    Attributes:
        runs: The run of each row; None if the row is empty.
        tensors: The tensors of all rows.
        microbatch, eval_microbatch: Examples at a time in training and in checks. Both are halved
            when they do not fit in memory.
    """

    def __init__(
        self,
        runs: Sequence[NetworkRun],
        microbatch: int = MICROBATCH,
        matmul_limit: int | None = None,
    ):
        first = runs[0]
        rule = rule_of(first.optimizer)
        assert rule is not None
        self.rule: Rule = rule
        self.runs: list[NetworkRun | None] = list(runs)
        self.module = first.module
        self.microbatch = microbatch
        self.eval_microbatch = CHUNK
        if matmul_limit is not None:
            self.matmul_limit = matmul_limit
        elif first.module.device.type == "cuda":
            self.matmul_limit = MATMUL_LIMIT
        else:
            self.matmul_limit = 0
        if trains_on_whole_batches(self.module):
            self.microbatch = WHOLE_BATCHES
        self._clipping = first.clipping
        self._buffer_names = {name for name, _ in self.module.named_buffers()}
        self._functional = Functional(self.module)
        trained = {}
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad:
                trained[name] = parameter
        self._layout = FlatLayout({name: parameter.shape for name, parameter in trained.items()})
        self._rule_update = StackedUpdate(rule, trained)
        rows = map(self._rows_of, runs)
        self.tensors: Rows = tree_map(lambda *tensors: torch.stack(tensors), *rows)
        self._checked = self.tensors

    def _rows_of(self, run: NetworkRun) -> Rows:
        """Return the tensors of a run."""
        parameters = dict(run.module.named_parameters())
        trained = {name: parameters[name] for name in self._layout.shapes}
        buffers = dict(run.module.named_buffers())
        for name, parameter in parameters.items():
            if name not in trained:
                buffers[name] = parameter.detach()
        weights = self._layout.flatten(trained).detach()
        keep = self._keep_of(run, trained)
        numbers = self.rule.hyperparameters_of(run.optimizer.param_groups[0])
        hyperparameters = {}
        for name, number in zip(self.rule.hyperparameters, numbers, strict=True):
            hyperparameters[name] = weights.new_tensor([number])
        state = self._rule_update.flat_state(trained, run.optimizer.state)
        delayed = self._delayed_of(run, parameters, weights)
        return Rows(weights, keep, hyperparameters, state, buffers, delayed)

    def _delayed_of(
        self, run: NetworkRun, parameters: Mapping[str, Tensor], weights: Tensor
    ) -> Tensor:
        """Return the delayed gradients of a run, with the type of its weights."""
        positions = {id(p): i for i, p in enumerate(run.optimizer.param_groups[0]["params"])}
        optimizer_state: Any = run.optimizer.state
        saved = optimizer_state.get(DELAY_STATE_KEY, [])
        delayed = weights.new_zeros(run.delay, self._layout.size)
        for step, gradients in enumerate(saved, start=run.steps - len(saved)):
            parts = {}
            for name in self._layout.shapes:
                gradient = gradients[positions[id(parameters[name])]]
                if gradient is None:
                    gradient = torch.zeros_like(parameters[name])
                parts[name] = gradient
            delayed[step % run.delay] = self._layout.flatten(parts)
        return delayed

    @property
    def weights(self) -> Tensor:
        """The trained parameters of each network, shape (rows, parameters)."""
        return self.tensors.weights

    @property
    def live(self) -> list[int]:
        """The rows with a run. The others are trained too, and their results are ignored."""
        return [row for row, run in enumerate(self.runs) if run is not None]

    def run_at(self, row: int) -> NetworkRun:
        """Return the run of a live row."""
        run = self.runs[row]
        assert run is not None
        return run

    def put(self, row: int, run: NetworkRun) -> None:
        """Put a new or resumed run into a row, in place of another."""
        new_tensors = self._rows_of(run)  # memory may be insufficient for them
        tree_map_(lambda ours, new: ours[row].copy_(new), self.tensors, new_tensors)
        self.runs[row] = run

    def take(self, rows: Sequence[int]) -> None:
        """Keep these rows only, in this order."""
        # Before anything changes, because memory may be insufficient for the copies.
        tensors = tree_map(lambda tensor: tensor[rows], self.tensors)
        self.runs = [self.runs[row] for row in rows]
        self.tensors = tensors
        self._checked = self.tensors

    def keep(self, interval: int, intervals: int) -> None:
        """Keep the rows as they are after an interval; see `NetworkBatch.keep`."""
        if intervals == 1:
            self._checked = self.tensors  # nothing changes them before the check
            return
        present = self._changing_tensors()
        if interval == 0:
            count = intervals * len(self.runs)
            self._checked = tree_map(
                lambda tensor: tensor.new_empty(count, *tensor.shape[1:]), present
            )
        first = self.number(interval, 0)
        rows = slice(first, first + len(self.runs))
        tree_map_(lambda kept, tensor: kept[rows].copy_(tensor), self._checked, present)

    def _changing_tensors(self) -> Rows:
        """Return the tensors that training changes; the others are empty."""
        nothing = self.tensors.keep.new_empty(len(self.runs), 0)
        return self.tensors._replace(keep=nothing, hyperparameters={})

    def number(self, interval: int, row: int) -> int:
        """Return the number of a row as it was kept after an interval."""
        return interval * len(self.runs) + row

    def bytes_of_rows(self) -> int:
        """Return the size of the tensors of all rows, which `keep` copies."""
        return sum(tensor.nbytes for tensor in tree_leaves(self._changing_tensors()))

    def write_back(self, row: int, number: int | None = None) -> None:
        """Copy the state of a row into the module, optimizer and schedule of its run.

        Args:
            row: The row.
            number: Number of the kept row whose state is copied; None for the present state.
        """
        tensors, place = self.tensors, row
        if number is not None:
            tensors, place = self._checked, number
        run = self.run_at(row)
        parameters = dict(run.module.named_parameters())
        self._copy_into(run.module, tensors, place)
        for key, layout in self._rule_update.state.items():
            for name, part in layout.split(tensors.state[key][place]).items():
                run.optimizer.state[parameters[name]][key] = part.clone()
        if self.rule.has_step_counter:
            # The optimizer makes no update before the first delayed gradient.
            updates = max(run.steps - run.delay, 0)
            for name in self._layout.shapes:
                run.optimizer.state[parameters[name]]["step"] = torch.tensor(float(updates))
        group = run.optimizer.param_groups[0]
        if run.delay:
            optimizer_state: Any = run.optimizer.state
            optimizer_state[DELAY_STATE_KEY] = self._delayed_gradients(
                run, tensors.delayed[place], parameters
            )
        group["lr"] = run.learning_rate(run.steps)
        # A table of rates begins with a new schedule again when the run is resumed.
        if run.schedule is not None and run.rates is None:
            run.schedule.last_epoch = run.steps
            run.schedule._last_lr = [group["lr"]]
            run.schedule._step_count = run.steps + 1

    def write_back_weights(self, row: int) -> None:
        """Copy the weights and buffers of a row into the module of its run."""
        self._copy_into(self.run_at(row).module, self.tensors, row)

    def _copy_into(self, module: nn.Module, tensors: Rows, place: int) -> None:
        """Copy weights and buffers at a place of row tensors into a module."""
        parameters = dict(module.named_parameters())
        with torch.no_grad():
            for name, weights in self._layout.split(tensors.weights[place]).items():
                parameters[name].copy_(weights)
            for name, buffer in module.named_buffers():
                buffer.copy_(tensors.buffers[name][place])

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
            parts = self._layout.split(delayed[step % run.delay].clone())
            order = run.optimizer.param_groups[0]["params"]
            steps.append([parts.get(names[id(parameter)]) for parameter in order])
        return steps

    def train(
        self, x: Tensor, y: Tensor, index: Tensor | tuple[Tensor, ...], steps_since_check: int = 0
    ) -> Tensor:
        """Take optimizer steps on images and classes of the training split.

        Args:
            x, y: Images and classes of the training split.
            index: Examples of each step: (steps, batch), the same for all rows, or (steps, rows,
                batch).
            steps_since_check: Steps since the last check.

        Returns:
            The loss of each network at the last step, before its update: shape (rows,).
        """
        numbers = StepNumbers.of(self.runs, steps_since_check, len(index), self.weights)
        loss = None
        for step, batch in enumerate(index):
            loss, gradients = self.gradients(x, y, batch)
            self._update(steps_since_check + step, gradients, numbers.at(step))
        assert loss is not None
        return loss

    def _update(self, step: int, gradients: Tensor, numbers: StepNumbers) -> None:
        """Take an optimizer step of all rows.

        Args:
            step: The number of the step since the last check, from 0.
            gradients: Shape (rows, parameters); may be changed.
            numbers: The numbers of this step.
        """
        tensors = self.tensors
        changing = self._rows_that_change(step + 1)
        dense = {row: self._gradients_of(gradients, row) for row in changing}
        gradients.mul_(tensors.keep)
        if tensors.delayed.shape[1]:
            gradients = exchange(tensors.delayed, gradients, numbers.places)
        self._show_gradients(step, gradients)
        if self._clipping is not None:
            self._clipping.clip_rows(gradients)
        self._rule_update(
            tensors.weights,
            gradients,
            tensors.state,
            numbers.rates,
            tensors.hyperparameters,
            numbers.updates,
        )
        if self.rule not in OURS:  # another rule may move pruned weights
            tensors.weights.mul_(tensors.keep)
        for row in changing:
            self._change_mask(row, step + 1, dense[row])

    def _show_gradients(self, step: int, gradients: Tensor) -> None:
        """Show the gradients that a step applies to the readings of the rows."""
        for row in self.live:
            run = self.run_at(row)
            if run.readings is not None:
                run.readings.count(run.learning_rate(run.steps + step))
                of_row = partial(self._gradients_of, gradients, row)
                run.readings.see_gradients(run.steps + step + 1, of_row)

    def _gradients_of(self, gradients: Tensor, row: int) -> dict[str, Tensor]:
        """Return copies of the gradients of a row by parameter."""
        return self._layout.split(gradients[row].clone())

    def _rows_that_change(self, steps: int) -> list[int]:
        """Return the live rows whose mask changes at this number of steps since the last check."""
        rows = []
        for row in self.live:
            run = self.run_at(row)
            if run.changes is not None and run.changes.is_due(run.steps + steps):
                rows.append(row)
        return rows

    def _change_mask(self, row: int, steps: int, gradients: Mapping[str, Tensor]) -> None:
        """Change the mask of a row, and set the weights and the state that it prunes to zero."""
        run = self.run_at(row)
        assert run.mask is not None
        weights = self._layout.split(self.weights[row])
        run.change_mask(
            run.steps + steps,
            {name: weights[name] for name in run.mask},
            {name: gradients[name] for name in run.mask},
        )
        keep = self._keep_of(run, weights)
        self.tensors.keep[row] = keep
        self.weights[row] *= keep
        keep_by_name = self._layout.split(keep)
        for key, layout in self._rule_update.state.items():
            for name, tensor in layout.split(self.tensors.state[key][row]).items():
                # As in `mask_optimizer_state`, a state of another shape has no pruned elements.
                if tensor.shape == keep_by_name[name].shape:
                    tensor *= keep_by_name[name]

    def _keep_of(self, run: NetworkRun, parameters: Mapping[str, Tensor]) -> Tensor:
        """Return 1 for each kept and 0 for each pruned parameter, shape (parameters,)."""
        mask = run.mask or {}
        keep = {}
        for name in self._layout.shapes:
            if name in mask:
                keep[name] = mask[name].to(parameters[name])
            else:
                keep[name] = torch.ones_like(parameters[name].detach())
        return self._layout.flatten(keep)

    def gradients(self, x: Tensor, y: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
        """Return loss and gradient of each network, shapes (rows,) and (rows, parameters).

        Args:
            x, y: Images and classes of the training split.
            batch: Examples of the step: (batch,) or (rows, batch).

        Raises:
            torch.OutOfMemoryError: If not even one example at a time fits in memory.
        """

        def compute() -> tuple[Tensor, Tensor]:
            weights = self.weights.detach().requires_grad_()
            total = torch.zeros(())
            for i, part in enumerate(batch.split(self.microbatch, dim=-1)):
                share = part.shape[-1] / batch.shape[-1]
                convolutions = nullcontext()
                if part.shape[-1] <= self.matmul_limit:
                    convolutions = ConvolutionsAsProducts()
                with convolutions:
                    losses = self._losses_of_rows(weights, x[part], y[part]) * share
                losses.sum().backward()
                total = losses.detach() if i == 0 else total + losses.detach()
            assert weights.grad is not None
            return total, weights.grad

        return halve_until_fits(compute, self, "microbatch", batch.shape[-1])

    def _losses_of_rows(self, weights: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """Return the loss of each network, and update its buffers, such as running statistics."""
        batch_dim = None if y.ndim == 1 else 0
        call = vmap(
            lambda tensors, buffers, x, y: self._functional.call_and_update(
                loss_of_pair, tensors, buffers, (x, y)
            ),
            (0, 0, batch_dim, batch_dim),
            randomness="different",
        )
        parameters = self._layout.split(weights)
        buffers = {}
        for name, tensor in self.tensors.buffers.items():
            if name in self._buffer_names:
                buffers[name] = tensor
            else:
                parameters[name] = tensor  # an untrained one
        losses, after = call(parameters, buffers, x, y)
        for name, buffer in after.items():
            buffers[name].copy_(buffer.detach())
        return losses

    def per_example_error(self, rows: Tensor, x: Tensor, y: Tensor, index: Tensor) -> Tensor:
        """See `NetworkBatch.per_example_error`.

        Raises:
            torch.OutOfMemoryError: If not even one example at a time fits in memory.
        """
        return halve_until_fits(
            lambda: torch.cat(self._evaluate("per_example_error", rows, x, y, index), 1),
            self,
            "eval_microbatch",
            index.shape[1],
        )

    def losses(self, rows: Tensor, x: Tensor, y: Tensor, index: Tensor) -> Tensor:
        """See `NetworkBatch.losses`.

        Raises:
            torch.OutOfMemoryError: If not even one example at a time fits in memory.
        """

        def compute() -> Tensor:
            parts = self._evaluate("summed_loss", rows, x, y, index)
            return torch.stack([part.double() for part in parts]).sum(0)

        return halve_until_fits(compute, self, "eval_microbatch", index.shape[1])

    def _evaluate(
        self, method: str, rows: Tensor, x: Tensor, y: Tensor, index: Tensor
    ) -> list[Tensor]:
        """Return the values of a method for each part of `eval_microbatch` examples."""
        # A part holds all networks at few examples, or few networks.
        networks = max(1, MAX_EVALUATED // min(self.eval_microbatch, index.shape[1]))
        values = []
        with evaluating(self.module):
            for part in index.split(self.eval_microbatch, 1):
                of_rows = []
                for some, examples in zip(rows.split(networks), part.split(networks), strict=True):
                    of_rows.append(self._evaluate_rows(method, some, x[examples], y[examples]))
                values.append(torch.cat(of_rows))
        return values

    def _evaluate_rows(self, method: str, rows: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """Return the values of a method for some of the rows that were kept."""
        weights = self._checked.weights[rows]
        buffers = {name: buffer[rows] for name, buffer in self._checked.buffers.items()}
        return self._over_rows(method, weights, buffers, x, y)

    def logged_metrics(
        self, rows: Tensor, batches: Sequence[Any], names: Sequence[str]
    ) -> Mapping[str, Tensor]:
        """See `NetworkBatch.logged_metrics`."""

        def tensors_of_rows(some: Tensor) -> dict[str, Tensor]:
            tensors = dict(self._layout.split(self._checked.weights[some]))
            for name, buffer in self._checked.buffers.items():
                tensors[name] = buffer[some]
            return tensors

        with evaluating(self.module):
            return metrics_of_rows(self._functional, tensors_of_rows, rows, batches, names)

    def finite(self) -> list[bool]:
        """See `NetworkBatch.finite`."""
        return self._checked.weights.isfinite().all(1).tolist()

    def _over_rows(
        self, method: str, weights: Tensor, buffers: Mapping[str, Tensor], x: Tensor, y: Tensor
    ) -> Tensor:
        """Call a method of the module for all rows; batches are shared if `y` has one dimension."""
        batch_dim = None if y.ndim == 1 else 0
        call = vmap(
            lambda tensors, x, y: self._functional.call(method, tensors, (x, y)),
            (0, batch_dim, batch_dim),
        )
        return call({**self._layout.split(weights), **buffers}, x, y)
