"""A stack: the networks of many trials as one tensor, trained at the same time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_leaves, tree_map, tree_map_

from lit_dps.engines.functional import Functional
from lit_dps.engines.interval_graph import GraphedSteps, capture_for
from lit_dps.engines.logged_module import loss_of_pair
from lit_dps.engines.matrix_products import ConvolutionsAsProducts
from lit_dps.engines.memory import WHOLE_BATCHES, halve_until_fits
from lit_dps.engines.network_rows import NetworkRows
from lit_dps.engines.network_run import NetworkRun
from lit_dps.engines.row_tensors import RowConverter, Rows, StepNumbers, exchange
from lit_dps.engines.snapshots import Snapshots, changing_tensors
from lit_dps.engines.stackable_loss import trains_on_whole_batches
from lit_dps.engines.step_batches import MixedBatch, StackBatches, parts_of
from lit_dps.optim import OURS

# Examples that fill a device. More at a time are not faster and need more memory.
MICROBATCH = 256
# Examples of all networks that fill a GPU. Few networks take more than `MICROBATCH` at a time.
GPU_EXAMPLES = 100 * MICROBATCH
# Examples at a time up to which convolutions on a GPU are matrix products. They are 3.6 times as
# fast as cuDNN's grouped convolutions at 2 examples, 2.1 times at 16 and 1.1 times at 256 (forward
# and backward, 100 networks of Simple-CNN, H200, 2026-11-26).
MATMUL_LIMIT = 64


class StackedNetworks(NetworkRows):
    """Networks of one architecture under one update rule, trained at the same time.

    The networks differ in weights, mask, learning rate and hyperparameters. `torch.vmap` calls
    `loss` and `per_example_error` of the module over the first dimension of the stacked parameters,
    so that the module does not need to support stacks.

    Args:
        runs: The runs, one a row. The module of the first run computes the losses of all rows,
            with the weights of each row.
        microbatch: Examples of a batch that are computed at a time. The gradients of the parts of a
            larger batch are added. Batches of some modules are not divided
            (`trains_on_whole_batches`). By default `MICROBATCH`, and more for few networks on a
            GPU.

    Attributes:
        runs: The run of each row; None if the row is empty.
        tensors: The tensors of all rows.
        snapshots: The rows that the next validations evaluate.
        microbatch: Examples at a time in training. It is halved when they do not fit in memory.
    """

    def __init__(self, runs: Sequence[NetworkRun], microbatch: int | None = None):
        super().__init__(runs)
        first = runs[0]
        is_on_gpu = first.module.device.type == "cuda"
        self.module = first.module
        self.microbatch = microbatch or MICROBATCH
        if microbatch is None and is_on_gpu:
            self.microbatch = max(MICROBATCH, GPU_EXAMPLES // len(runs))
        self._matmul_limit = 0  # examples at a time up to which convolutions are matrix products
        if is_on_gpu:
            self._matmul_limit = MATMUL_LIMIT
        if trains_on_whole_batches(self.module, first.keeps_untrained):
            self.microbatch = WHOLE_BATCHES
        self._clipping = first.clipping
        self._buffer_names = {name for name, _ in self.module.named_buffers()}
        self._functional = Functional(self.module)
        self._converter = RowConverter(first)
        self._layout = self._converter.layout
        self._rule_update = self._converter.update
        rows = map(self._converter.rows_of, runs)
        self.tensors: Rows = tree_map(lambda *tensors: torch.stack(tensors), *rows)
        self.snapshots = Snapshots(self.module, self._functional, self._layout, self.tensors)
        self._graphed: GraphedSteps | None = None
        self._graphed_split: Any = None

    @property
    def weights(self) -> Tensor:
        """The trained parameters of each network, shape (rows, parameters)."""
        return self.tensors.weights

    def put(self, row: int, run: NetworkRun) -> None:
        """Put a new or resumed run into a row, in place of another."""
        new_tensors = self._converter.rows_of(run)  # memory may be insufficient for them
        tree_map_(lambda ours, new: ours[row].copy_(new), self.tensors, new_tensors)
        self.runs[row] = run

    def take(self, rows: Sequence[int]) -> None:
        """Keep these rows only, in this order."""
        # Before anything changes, because memory may be insufficient for the copies.
        tensors = tree_map(lambda tensor: tensor[rows], self.tensors)
        self.runs = [self.runs[row] for row in rows]
        self.tensors = tensors
        self.snapshots.store(self.tensors, 0, 1)
        if self._graphed is not None:
            self._graphed.forget()

    def snapshot(self, interval: int, intervals: int) -> None:
        """See `NetworkRows.snapshot`."""
        self.snapshots.store(self.tensors, interval, intervals)

    def bytes_of_snapshot(self) -> int:
        """Return the size of the tensors of all rows, which `snapshot` copies."""
        return sum(tensor.nbytes for tensor in tree_leaves(changing_tensors(self.tensors)))

    def write_back(self, row: int, snapshot_index: int | None = None) -> None:
        """See `NetworkRows.write_back`."""
        if snapshot_index is None:
            self._converter.write_back(self.run_at(row), self.tensors, row)
        else:
            self._converter.write_back(self.run_at(row), self.snapshots.tensors, snapshot_index)

    def write_back_weights(self, row: int) -> None:
        """Copy the weights and buffers of a row into the module of its run."""
        self._converter.copy_weights(self.run_at(row).module, self.tensors, row)

    def train(
        self, x: Tensor, y: Tensor, index: StackBatches, steps_since_validation: int = 0
    ) -> Tensor:
        """Take optimizer steps on images and classes of the training split.

        Args:
            x, y: Images and classes of the training split.
            index: Examples of each step: (steps, batch), the same for all rows, or (steps, rows,
                batch). A batch for each step if these differ in size, on any device.
            steps_since_validation: Steps since the last validation.

        Returns:
            The loss of each network at the last step, before its update: shape (rows,).
        """
        numbers = StepNumbers.of(self.runs, steps_since_validation, len(index), self.weights)
        acts_between_steps = False
        for row in self.live:
            run = self.run_at(row)
            if run.readings is not None or run.changes is not None:
                acts_between_steps = True
        losses = None
        if acts_between_steps:
            for step, batch in enumerate(index):
                batch = batch.to(y.device)
                losses = self._step(x, y, batch, numbers.at(step), steps_since_validation + step)
        elif isinstance(index, Tensor):
            losses = self._graphed_steps(x, y).train(self.tensors, index, numbers)
        else:
            losses = self._train_parts(x, y, index, numbers)
        assert losses is not None
        return losses

    def _train_parts(
        self, x: Tensor, y: Tensor, index: tuple[Tensor | MixedBatch, ...], numbers: StepNumbers
    ) -> Tensor | None:
        """Take optimizer steps whose batches differ in size; see `train`."""
        losses = None
        done = 0
        for part in parts_of(index, y.device):
            if isinstance(part, MixedBatch):
                losses = self._step(x, y, part, numbers.at(done))
                done += 1
            else:
                of_part = numbers.at(slice(done, done + len(part)))
                losses = self._graphed_steps(x, y).train(self.tensors, part, of_part)
                done += len(part)
        return losses

    def _graphed_steps(self, x: Tensor, y: Tensor) -> GraphedSteps:
        """Return what takes the steps on a training split."""
        if self._graphed is None or self._graphed_split is not x:
            self._graphed = GraphedSteps(partial(self._step, x, y), capture_for(y.device))
            self._graphed_split = x
        return self._graphed

    def _step(
        self, x: Tensor, y: Tensor, batch: Tensor | MixedBatch, numbers: StepNumbers, step: int = 0
    ) -> Tensor:
        """Take an optimizer step of all rows; return their losses before it, shape (rows,).

        Args:
            x, y: Images and classes of the training split.
            batch: Examples of the step: (batch,) or (rows, batch), or a `MixedBatch`.
            numbers: The numbers of the step.
            step: Steps since the last validation, if anything acts between steps.
        """
        losses, gradients = self.gradients(x, y, batch)
        tensors = self.tensors
        changing = self._rows_that_change(step + 1)
        dense = {row: self._gradients_of(gradients, row) for row in changing}
        gradients.mul_(tensors.mask)
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
        if self._rule_update.rule not in OURS:  # another rule may move pruned weights
            tensors.weights.mul_(tensors.mask)
        tensors.update_average(self._examples_of_rows(batch))
        for row in changing:
            self._change_mask(row, step + 1, dense[row])
        return losses

    def _examples_of_rows(self, batch: Tensor | MixedBatch) -> Tensor:
        """Return the number of examples of each row in a batch, shape (rows, 1)."""
        if isinstance(batch, Tensor):
            return self.weights.new_full((len(self.runs), 1), batch.shape[-1])
        examples = self.weights.new_zeros(len(self.runs), 1)
        for rows, of_rows in batch.parts:
            examples[rows] = float(of_rows.shape[-1])
        return examples

    def _show_gradients(self, step: int, gradients: Tensor) -> None:
        """Show the gradients that a step applies to the readings of the rows."""
        for row in self.live:
            run = self.run_at(row)
            if run.readings is not None:
                run.readings.count(run.applied_rates(run.steps + step)[0])
                of_row = partial(self._gradients_of, gradients, row)
                run.readings.see_gradients(run.steps + step + 1, of_row)

    def _gradients_of(self, gradients: Tensor, row: int) -> dict[str, Tensor]:
        """Return copies of the gradients of a row by parameter."""
        return self._layout.split(gradients[row].clone())

    def _rows_that_change(self, steps: int) -> list[int]:
        """Return the live rows whose mask changes after these steps since the last validation."""
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
        mask = self._converter.mask_of(run, weights)
        self.tensors.mask[row] = mask
        self.weights[row] *= mask
        if self.tensors.average.shape[1]:
            self.tensors.average[row] *= mask
        mask_by_name = self._layout.split(mask)
        for key, layout in self._rule_update.state.items():
            for name, tensor in layout.split(self.tensors.state[key][row]).items():
                # As in `mask_optimizer_state`, a matrix of SOAP has no pruned elements.
                of_parameter = mask_by_name[name]
                if key in self._rule_update.rule.elementwise_state(of_parameter.ndim):
                    tensor *= of_parameter

    def gradients(self, x: Tensor, y: Tensor, batch: Tensor | MixedBatch) -> tuple[Tensor, Tensor]:
        """Return loss and gradient of each network, shapes (rows,) and (rows, parameters).

        Args:
            x, y: Images and classes of the training split.
            batch: Examples of the step: (batch,) or (rows, batch), or a `MixedBatch`, in which
                empty rows have no examples. Their loss and gradient are 0.

        Raises:
            torch.OutOfMemoryError: If not even one example at a time fits in memory.
        """
        if isinstance(batch, Tensor):
            return self._gradients_of_batch(x, y, batch)
        losses = None
        gradients = torch.zeros_like(self.weights)
        for rows, examples in batch.parts:
            of_part, gradients[rows] = self._gradients_of_batch(x, y, examples, rows)
            if losses is None:
                losses = of_part.new_zeros(len(self.runs))
            losses[rows] = of_part
        assert losses is not None
        return losses, gradients

    def _gradients_of_batch(
        self, x: Tensor, y: Tensor, batch: Tensor, rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return loss and gradient of some rows; see `gradients`.

        Args:
            x, y: Images and classes of the training split.
            batch: Their examples: (batch,) or (rows, batch).
            rows: The rows; None for all.
        """
        points = self._rule_update.gradient_points(
            self.weights, self.tensors.state, self.tensors.hyperparameters
        )
        of_rows = points if rows is None else points[rows]

        def compute() -> tuple[Tensor, Tensor]:
            weights = of_rows.detach().requires_grad_()
            total = torch.zeros(())
            for i, part in enumerate(batch.split(self.microbatch, dim=-1)):
                share = part.shape[-1] / batch.shape[-1]
                convolutions = nullcontext()
                if part.shape[-1] <= self._matmul_limit:
                    convolutions = ConvolutionsAsProducts()
                batch_dim = 0 if part.ndim > 1 else None
                with convolutions:
                    losses = self._losses_of_rows(weights, x[part], y[part], batch_dim, rows)
                losses = losses * share
                losses.sum().backward()
                total = losses.detach() if i == 0 else total + losses.detach()
            assert weights.grad is not None
            return total, weights.grad

        return halve_until_fits(compute, self, batch.shape[-1])

    def _losses_of_rows(
        self,
        weights: Tensor,
        x: Tensor,
        y: Tensor,
        batch_dim: int | None,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Return the loss of each network, and update its buffers, such as running statistics.

        Args:
            weights: The weights of some rows.
            x, y: The examples of their batch.
            batch_dim: The dimension of the rows in the batch; None if all rows share it.
            rows: The rows; None for all.
        """
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
            of_rows = tensor if rows is None else tensor[rows]
            if name in self._buffer_names:
                buffers[name] = of_rows
            else:
                parameters[name] = of_rows  # an untrained one
        losses, after = call(parameters, buffers, x, y)
        for name, buffer in after.items():
            if rows is None:
                buffers[name].copy_(buffer.detach())
            else:
                self.tensors.buffers[name][rows] = buffer.detach()
        if rows is not None:
            # `parameters` has copies of these rows, so in-place changes are written back.
            for name in self.tensors.buffers.keys() - after.keys():
                self.tensors.buffers[name][rows] = parameters[name].detach()
        return losses
