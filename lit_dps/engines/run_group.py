"""RunGroup trains runs together from one check to the next, checks them and saves them.

`SingleNetwork` trains a group of one run; `lit_dps.engines.stack` trains larger groups.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from lit_dps.core.unit import EXAMPLES, SECONDS
from lit_dps.data.loaders import Steps
from lit_dps.engines.engine import Training
from lit_dps.engines.module_hooks import STEP_HOOKS, NeedsLightning, overridden
from lit_dps.engines.network_run import CheckOutcome, NetworkRun
from lit_dps.module import weights_finite
from lit_dps.optim import OURS, rule_of
from lit_dps.optim.delay import delay_gradients
from lit_dps.optim.local_sgd import LocalSGD
from lit_dps.optim.parameter_groups import parameters_of
from lit_dps.parallel.process import Interrupted
from lit_dps.pruning.mask import multiply
from lit_dps.pruning.mask_changes import mask_optimizer_state
from lit_dps.training.checkpoint_files import MIN_SECONDS_WORTH_SAVING
from lit_dps.training.early_check import Check, HardestFirst, evaluating
from lit_dps.training.local_sgd_callback import SharedTensors, mean_of, part_of
from lit_dps.training.masked_tensors import gradients_of
from lit_dps.training.stopwatch import Stopwatch


class NetworkBatch(Protocol):
    """The networks that train together, one a row: `SingleNetwork` or `StackedNetworks`.

    Attributes:
        runs: The run of each row; None if the row is empty.
        live: The rows that are not empty.
    """

    runs: list[NetworkRun | None]

    @property
    def live(self) -> Sequence[int]: ...

    def run_at(self, row: int) -> NetworkRun:
        """Return the run of a live row."""
        ...

    def train(
        self, x: Tensor, y: Tensor, index: Tensor | tuple[Tensor, ...], steps_since_check: int = 0
    ) -> Tensor:
        """Take optimizer steps; return the loss of each row at the last step, before its update.

        Args:
            x, y: Images and classes of the training split.
            index: Examples of each step: (steps, batch), or (steps, rows, batch) if rows differ.
                For a single network also a tensor for each step.
            steps_since_check: Steps since the last check.
        """
        ...

    def finite(self) -> list[bool]:
        """Return for each row whether all weights are finite."""
        ...

    def write_back(self, row: int) -> None:
        """Copy the state of a row into the module, optimizer and schedule of its run."""
        ...

    def write_back_weights(self, row: int) -> None:
        """Copy the weights of a row into the module of its run."""
        ...

    def per_example_error(self, rows: Tensor, x: Tensor, y: Tensor, index: Tensor) -> Tensor:
        """Return the module's error of each example, shape (rows, examples) like `index`."""
        ...

    def losses(self, rows: Tensor, x: Tensor, y: Tensor, index: Tensor) -> Tensor:
        """Return the loss of each row summed over examples: float64, shape (rows,)."""
        ...


class RunGroup:
    """Trains runs together from one check to the next, checks them and saves them.

    The caller passes the outcomes of the checks to the runs, which decide whether they continue.

    Args:
        networks: The networks of the runs.
        training: The settings of the study.

    Attributes:
        networks: The networks of the runs.
        hardest_first: Orders the validation examples of each row, for early checks.
        stopwatch: Measures the seconds of steps and of checks.
    """

    def __init__(self, networks: NetworkBatch, training: Training):
        self.networks = networks
        first = networks.run_at(0)
        self._training = training
        self._device = first.module.device
        self._eval_batch_size = first.data.eval_batch_size
        self._train_split = first.data.on_device("train", self._device)
        self._validation_split = first.data.on_device("val", self._device)
        self.stopwatch = Stopwatch()
        rows = len(networks.runs)
        self.hardest_first = HardestFirst(self._validation_size, rows, self._device)

    @property
    def _validation_size(self) -> int:
        return len(self._validation_split[1])

    def train_interval(self) -> list[CheckOutcome]:
        """Train all runs for `check_interval` steps, and return the outcomes of their checks.

        The best outcome comes first, because it may end the other runs of its cell.
        """
        seconds_before = self.stopwatch.training_seconds
        self.stopwatch.switch_to("training")
        index = self._next_batches()
        losses = self._train_steps(index).tolist()
        # The losses were copied from the device, so it has finished the steps.
        self.stopwatch.switch_to("checking")
        finite = self.networks.finite()
        checks = self._check()
        metrics = self._further_metrics()
        self.stopwatch.add_check(self._training.goal.check_interval)
        spent = {
            EXAMPLES.column: sum(of_step.shape[-1] for of_step in index),
            SECONDS.column: self.stopwatch.training_seconds - seconds_before,
        }
        outcomes = []
        for row, check, further in zip(self.networks.live, checks, metrics, strict=True):
            error = check.error(self._validation_size)
            values = {**further, **spent}
            outcomes.append(CheckOutcome(row, error, check.exact, losses[row], finite[row], values))
        return sorted(outcomes, key=lambda outcome: outcome.error)

    def _train_steps(self, index: Tensor | tuple[Tensor, ...]) -> Tensor:
        """Train the steps of an interval, and take the readings that follow each of them.

        Args:
            index: As in `NetworkBatch.train`.

        Returns:
            The loss of each row at the last step, before its update.
        """
        rows_to_read = self._rows_to_read(len(index))
        done = 0
        losses = None
        for end in sorted({*rows_to_read, len(index)}):
            losses = self.networks.train(*self._train_split, index[done:end], done)
            for row in rows_to_read.get(end, ()):
                run = self.networks.run_at(row)
                assert run.readings is not None
                with self.stopwatch.paused(self._device):
                    self.networks.write_back_weights(row)
                    run.readings.read(run.steps + end, run)
                    run.readings.before(run.steps + end + 1, run)
            done = end
        assert losses is not None
        return losses

    def _rows_to_read(self, steps: int) -> dict[int, list[int]]:
        """Return the rows with a reading, by the number of steps since the last check.

        Args:
            steps: Steps of the interval.
        """
        rows: dict[int, list[int]] = {}
        for row in self.networks.live:
            run = self.networks.run_at(row)
            if run.readings is not None:
                for step in run.readings.due_steps(run.steps, run.steps + steps):
                    rows.setdefault(step - run.steps, []).append(row)
        return rows

    def read_end(self, row: int) -> None:
        """Take the readings of the end of a run, if it has come to its own end."""
        run = self.networks.run_at(row)
        if run.readings is not None and run.readings.is_end_due:
            self.networks.write_back_weights(row)
            run.read_end()

    def _next_batches(self) -> Tensor | tuple[Tensor, ...]:
        """Return the batches of the next interval.

        Their shape is (steps, batch) if all runs have the same batches, else (steps, rows, batch).
        If the batches of a single network differ in size, there is a tensor for each.
        """
        batches: dict[int, Tensor] = {}
        for row in self.networks.live:
            of_row = next(self.networks.run_at(row).batches)
            if not isinstance(of_row, Tensor):
                return tuple(index.to(self._device) for index in of_row)
            batches[row] = of_row
        first = batches[self.networks.live[0]]
        if all(torch.equal(of_row, first) for of_row in batches.values()):
            return first.to(self._device)
        # The networks of empty rows are trained too, and their results are ignored.
        filled = [batches.get(row, first) for row in range(len(self.networks.runs))]
        return torch.stack(filled, dim=1).to(self._device)

    def _check(self) -> list[Check]:
        """Return the check of each live run. Early checks stop when the goal is surely missed."""
        networks = self.networks
        x, y = self._validation_split
        if self._training.goal.stops_checks_early:
            rows = torch.tensor(networks.live, device=self._device)
            allowed = []
            for row in networks.live:
                allowed.append(networks.run_at(row).attempt.max_mistakes(self._validation_size))
            return self.hardest_first(
                lambda which, index: networks.per_example_error(rows[which], x, y, index),
                networks.live,
                allowed,
            )
        mistakes = torch.zeros(len(networks.live), dtype=torch.int64, device=self._device)
        for rows, index in self._validation_batches():
            mistakes += (networks.per_example_error(rows, x, y, index) >= 1).sum(1)
        return [Check(count, exact=True) for count in mistakes.tolist()]

    def _further_metrics(self) -> Sequence[Mapping[str, float]]:
        """Return `val_loss` of each live run if the study keeps it, rounded to float32."""
        live = self.networks.live
        if not self._training.metrics:
            return [{}] * len(live)
        x, y = self._validation_split
        total = torch.zeros(len(live), dtype=torch.float64, device=self._device)
        for rows, index in self._validation_batches():
            total += self.networks.losses(rows, x, y, index)
        # A value that Lightning logs is rounded in the same way.
        means = (total.float() / len(y)).double()
        return [{"val_loss": loss} for loss in means.tolist()]

    def _validation_batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the live rows and the batches of the validation split, as in Lightning's loop."""
        live = self.networks.live
        rows = torch.tensor(live, device=self._device)
        examples = torch.arange(self._validation_size, device=self._device)
        for index in examples.split(self._eval_batch_size):
            yield rows, index.expand(len(live), -1)

    def end_interval(self, at_check: Callable[[], None]) -> None:
        """Call `at_check`, and save the live runs whose last checkpoint is old.

        `at_check` raises to end the process. Then all live runs that are worth a file are saved,
        unless a second signal requires that the process ends now.
        """
        try:
            at_check()
        except BaseException as error:
            ends_now = isinstance(error, Interrupted) and error.now
            if not ends_now:
                for row in self.networks.live:
                    self.save_if_worth_it(row)
            raise
        for row in self.networks.live:
            self.save_if_due(row)

    def save_if_due(self, row: int) -> None:
        """Save a run that continues, if its last file is older than the checkpoint interval."""
        self._save_if_older(row, math.inf)

    def save_if_worth_it(self, row: int) -> None:
        """Save a run that ends or pauses here, unless it is faster to train its steps again."""
        self._save_if_older(row, MIN_SECONDS_WORTH_SAVING)

    def _save_if_older(self, row: int, seconds: float) -> None:
        """Save a run if its last file is older than `seconds` or than the checkpoint interval."""
        run = self.networks.run_at(row)
        checkpoints = self._training.checkpoints
        if run.file is None or checkpoints is None:
            return
        if time.monotonic() - run.saved_at >= min(seconds, checkpoints.seconds):
            self.networks.write_back(row)
            run.save()


class SingleNetwork:
    """Trains one network with the same result as Lightning's loop, to the bit.

    It calls the module's loss and optimizer in the same order. Lightning also asks hooks, loggers
    and counters after each batch, which takes 0.4 ms: nearly as long as a step of Simple-CNN at a
    batch size of 2. This class has the interface of a `StackedNetworks` with one row.

    Args:
        run: The run to train.
    """

    live: Sequence[int] = (0,)

    def __init__(self, run: NetworkRun):
        self.runs: list[NetworkRun | None] = [run]
        self.run = run
        self._masked = run.masked_parameters()
        # The rules of lit_dps do not move weights with masked gradients. Another rule may move any
        # weight, for example by noise, and so may a hook.
        self._has_step_hooks = bool(overridden(run.module, STEP_HOOKS))
        self._moves_pruned = rule_of(run.optimizer) not in OURS or self._has_step_hooks
        self._trainable = self._find_trainable()
        self._local: tuple[LocalSGD, SharedTensors] | None = None
        if run.local is not None:
            self._local = run.local, SharedTensors(run.module, run.optimizer, run.local.rounds)

    def run_at(self, row: int) -> NetworkRun:
        """Return the run."""
        return self.run

    def train(
        self, x: Tensor, y: Tensor, index: Tensor | tuple[Tensor, ...], steps_since_check: int = 0
    ) -> Tensor:
        """Take one optimizer step for each row of `index`; see `StackedNetworks.train`."""
        schedule = self.run.schedule
        loss = None
        first_step = self.run.steps + steps_since_check + 1
        for step, batch in enumerate(Steps(x, y, index), first_step):
            if self.run.changes is not None and self.run.changes.is_due(step):
                loss = self._update_and_change_mask(batch, step)
            elif self._local is None:
                loss = self._update(batch, step)
            else:
                loss = self._update_workers(batch, step, *self._local)
            if schedule is not None:
                schedule.step()
        if self._local is not None:
            local, shared = self._local
            shared.check()
            local.show()  # so that the check sees the average of the workers
        if self._find_trainable() != self._trainable:
            name = type(self.run.module).__name__
            raise NeedsLightning(f"{name} changes which weights are trained")
        assert loss is not None
        return loss[None]

    def _find_trainable(self) -> list[bool]:
        """Return for each parameter whether it is trained."""
        return [parameter.requires_grad for parameter in self.run.module.parameters()]

    def _update_workers(
        self, batch: tuple[Tensor, Tensor], step: int, local: LocalSGD, shared: SharedTensors
    ) -> Tensor:
        """Take a step of all workers of local SGD; return their mean loss before it."""
        losses = []

        def update(worker: int | None) -> None:
            if worker is None:
                part = batch
            else:
                part = part_of(batch, worker, local.rounds.workers, len(batch[0]))
            losses.append(self._update(part, step))

        local.step(update)
        if local.steps == 1:
            shared.check()
        return mean_of(losses)

    def _update(self, batch: tuple[Tensor, Tensor], step: int) -> Tensor:
        """Take optimizer step number `step`; return the loss before it."""
        loss = self._loss_and_gradients(batch)
        self._mask_gradients()
        self.run.module.on_after_backward()
        if self._has_step_hooks:
            self._mask_gradients()
        delay_gradients(self.run.optimizer, self.run.delay)
        self._step(step)
        return loss

    def _update_and_change_mask(self, batch: tuple[Tensor, Tensor], step: int) -> Tensor:
        """Take optimizer step number `step`, then change the mask; return the loss before it."""
        run = self.run
        loss = self._loss_and_gradients(batch)
        run.module.on_after_backward()
        weights = {}
        gradients = {}
        parameters = dict(run.module.named_parameters())
        for name in run.mask or {}:
            weights[name] = parameters[name].detach()
            gradient = parameters[name].grad
            gradients[name] = torch.zeros_like(weights[name])
            if gradient is not None:
                gradients[name].copy_(gradient)
        self._mask_gradients()
        self._step(step)
        run.change_mask(step, weights, gradients)
        self._masked = run.masked_parameters()
        with torch.no_grad():
            multiply(self._masked)
            mask_optimizer_state(run.optimizer, self._masked)
        return loss

    def _loss_and_gradients(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Set the gradients of all parameters, and return the loss."""
        module = self.run.module
        loss = module.loss(batch)
        module.on_before_zero_grad(self.run.optimizer)
        self.run.optimizer.zero_grad()
        module.on_before_backward(loss)
        loss.backward()
        return loss.detach()

    def _step(self, step: int) -> None:
        """Step the optimizer for the time number `step`."""
        run = self.run
        if run.readings is not None:
            run.readings.count(float(run.optimizer.param_groups[0]["lr"]))
            run.readings.see_gradients(step, partial(gradients_of, run.module, run.optimizer))
        run.module.on_before_optimizer_step(run.optimizer)
        if run.clipping is not None:
            run.clipping.clip(parameters_of(run.optimizer))
        run.optimizer.step()
        if self._moves_pruned:
            with torch.no_grad():
                multiply(self._masked)

    def _mask_gradients(self) -> None:
        """Set the gradients of pruned weights to zero."""
        gradients = []
        for parameter, keep in self._masked:
            if parameter.grad is not None:
                gradients.append((parameter.grad, keep))
        multiply(gradients)

    def write_back(self, row: int) -> None:
        """Do nothing: module and optimizer of the run are up to date."""

    def write_back_weights(self, row: int) -> None:
        """Do nothing: the module of the run is up to date."""

    def finite(self) -> list[bool]:
        """Return whether all weights are finite, in a list of one."""
        return [weights_finite(self.run.module)]

    def losses(self, rows: Tensor, x: Tensor, y: Tensor, index: Tensor) -> Tensor:
        """See `NetworkBatch.losses`."""
        with evaluating(self.run.module):
            return self.run.module.summed_loss((x[index[0]], y[index[0]])).double()[None]

    def per_example_error(self, rows: Tensor, x: Tensor, y: Tensor, index: Tensor) -> Tensor:
        """See `NetworkBatch.per_example_error`."""
        with evaluating(self.run.module):
            return self.run.module.per_example_error((x[index[0]], y[index[0]])).float()[None]
