"""RunGroup trains runs together from one check to the next, checks them and saves them.

`SingleNetwork` trains a group of one run; `lit_dps.engines.stack` trains larger groups.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

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

Value = TypeVar("Value")
# Intervals that a stack trains before their checks. More of them save no time.
MAX_INTERVALS_AHEAD = 16
# Share of all intervals that rows train beyond their end, on average.
WASTED_SHARE = 0.06
# A signal or a pause waits this long for the end of the intervals.
MAX_SECONDS_AHEAD = 2.0
# Share of the device's free memory for the rows that are kept for their checks.
MEMORY_SHARE_AHEAD = 0.2


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

    def keep(self, interval: int, intervals: int) -> None:
        """Keep the rows as they are after an interval, for its check.

        Args:
            interval: Number of the interval since the last checks, from 0.
            intervals: How many intervals are trained before the next checks.
        """
        ...

    def number(self, interval: int, row: int) -> int:
        """Return the number of a row as it was kept after an interval."""
        ...

    def bytes_of_rows(self) -> int:
        """Return how many bytes `keep` needs for an interval."""
        ...

    def finite(self) -> list[bool]:
        """Return for each kept row, by its number, whether all weights are finite."""
        ...

    def write_back(self, row: int, number: int | None = None) -> None:
        """Copy the state of a row into the module, optimizer and schedule of its run.

        Args:
            row: The row.
            number: Number of the kept row whose state is copied; None for the present state.
        """
        ...

    def write_back_weights(self, row: int) -> None:
        """Copy the weights of a row into the module of its run."""
        ...

    def per_example_error(self, rows: Tensor, x: Tensor, y: Tensor, index: Tensor) -> Tensor:
        """Return the module's error of each example, shape (rows, examples) like `index`.

        Args:
            rows: Numbers of kept rows.
            x, y: Images and classes of the validation split.
            index: Examples of each row, shape (rows, examples).
        """
        ...

    def losses(self, rows: Tensor, x: Tensor, y: Tensor, index: Tensor) -> Tensor:
        """Return the loss of each row summed over examples: float64, shape (rows,).

        Args:
            rows, x, y, index: As in `per_example_error`.
        """
        ...


class Intervals(NamedTuple):
    """Intervals that were trained one after another, and then checked.

    The checks of an interval are a list, with a value for each row that was live.

    Attributes:
        live: The rows that were live.
        losses: Training loss of the last step of each interval.
        finite: Whether all weights were finite.
        checks: The checks of each interval. A check that stopped early knows only whether the
            network has more mistakes than the first of these checks allows.
        metrics: Values of the further metrics.
        spent: Examples and seconds of an interval.
    """

    live: list[int]
    losses: list[list[float]]
    finite: list[list[bool]]
    checks: list[list[Check]]
    metrics: list[list[Mapping[str, float]]]
    spent: Mapping[str, float]


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
        self._intervals_done = 0
        rows = len(networks.runs)
        self.hardest_first = HardestFirst(self._validation_size, rows, self._device)

    @property
    def _validation_size(self) -> int:
        return len(self._validation_split[1])

    def choose_intervals(self, requested: int | None = None) -> int:
        """Return how many intervals to train before the next checks.

        Nothing in training depends on a check but its end, so several intervals can be checked at
        once. A GPU then waits less often for the host. A row that ends has trained some intervals
        in vain, on average less than `WASTED_SHARE` of all. On a CPU nothing is gained.

        Args:
            requested: How many if nothing acts between two intervals; None to choose.
        """
        done = 0
        for row in self.networks.live:
            run = self.networks.run_at(row)
            if run.readings is not None or run.changes is not None:
                return 1
            done += run.steps // self._training.goal.check_interval
        if requested is not None:
            return requested
        if self._device.type == "cpu":
            return 1
        intervals = 2 * WASTED_SHARE * done / len(self.networks.live)
        if self._intervals_done:
            seconds = self.stopwatch.training_seconds / self._intervals_done
            intervals = min(intervals, MAX_SECONDS_AHEAD / seconds)
        free, _ = torch.cuda.mem_get_info(self._device)
        intervals = min(intervals, MEMORY_SHARE_AHEAD * free / self.networks.bytes_of_rows())
        return max(1, min(int(intervals), MAX_INTERVALS_AHEAD))

    def train_intervals(self, count: int) -> Intervals:
        """Train all runs for `count` check intervals, and check each run at the end of each."""
        seconds_before = self.stopwatch.training_seconds
        interval = self._training.goal.check_interval
        self.stopwatch.switch_to("training")
        examples = 0
        losses = []
        for i in range(count):
            index = self._next_batches()
            losses.append(self._train_steps(index, i * interval))
            self.networks.keep(i, count)
            examples = sum(of_step.shape[-1] for of_step in index)
        all_losses = torch.stack(losses).tolist()
        # The losses were copied from the device, so it has finished the steps.
        self.stopwatch.switch_to("checking")
        live = list(self.networks.live)
        numbers = [[self.networks.number(i, row) for row in live] for i in range(count)]
        finite = self.networks.finite()
        checks = self._check(numbers)
        metrics = self._further_metrics(numbers)
        for _ in range(count):
            self.stopwatch.add_check(interval)
        self._intervals_done += count
        seconds = self.stopwatch.training_seconds - seconds_before
        return Intervals(
            live,
            [[of_rows[row] for row in live] for of_rows in all_losses],
            [[finite[number] for number in of_interval] for of_interval in numbers],
            checks,
            metrics,
            {EXAMPLES.column: examples, SECONDS.column: seconds / count},
        )

    def outcomes(self, intervals: Intervals, i: int) -> list[CheckOutcome]:
        """Return the outcomes of the checks after the i-th interval, for the rows still live.

        The best outcome comes first, because it may end the other runs of its cell. Ask for the
        outcomes of an interval after the outcomes before it are recorded.
        """
        outcomes = []
        for place, row in enumerate(intervals.live):
            if self.networks.runs[row] is None:
                continue
            check = intervals.checks[i][place]
            if self._training.goal.stops_checks_early:
                # A run may have met an easier goal at an interval before.
                allowed = self.networks.run_at(row).attempt.max_mistakes(self._validation_size)
                check = Check.of(check.mistakes, allowed, self._validation_size)
            outcome = CheckOutcome(
                row=row,
                error=check.error(self._validation_size),
                exact=check.exact,
                loss=intervals.losses[i][place],
                finite=intervals.finite[i][place],
                metrics={**intervals.metrics[i][place], **intervals.spent},
                number=self.networks.number(i, row),
            )
            outcomes.append(outcome)
        return sorted(outcomes, key=lambda outcome: outcome.error)

    def _train_steps(self, index: Tensor | tuple[Tensor, ...], before: int) -> Tensor:
        """Train the steps of an interval, and take the readings that follow each of them.

        Args:
            index: As in `NetworkBatch.train`.
            before: Steps since the last check.

        Returns:
            The loss of each row at the last step, before its update.
        """
        rows_to_read = self._rows_to_read(len(index))
        done = 0
        losses = None
        for end in sorted({*rows_to_read, len(index)}):
            losses = self.networks.train(*self._train_split, index[done:end], before + done)
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

    def _check(self, numbers: list[list[int]]) -> list[list[Check]]:
        """Return the checks of kept rows. Early checks stop when the goal is surely missed.

        Args:
            numbers: The numbers of the live rows, after each interval.
        """
        networks = self.networks
        x, y = self._validation_split
        which = self._flat(numbers)
        if self._training.goal.stops_checks_early:
            allowed = []
            for row in networks.live:
                allowed.append(networks.run_at(row).attempt.max_mistakes(self._validation_size))
            checks = self.hardest_first(
                lambda some, index: networks.per_example_error(which[some], x, y, index),
                list(networks.live) * len(numbers),
                allowed * len(numbers),
            )
        else:
            mistakes = torch.zeros(len(which), dtype=torch.int64, device=self._device)
            for index in self._validation_batches(len(which)):
                mistakes += (networks.per_example_error(which, x, y, index) >= 1).sum(1)
            checks = [Check(count, exact=True) for count in mistakes.tolist()]
        return self._by_interval(checks)

    def _further_metrics(self, numbers: list[list[int]]) -> list[list[Mapping[str, float]]]:
        """Return `val_loss` of kept rows if the study keeps it, rounded to float32."""
        which = self._flat(numbers)
        if not self._training.metrics:
            return self._by_interval([{}] * len(which))
        x, y = self._validation_split
        total = torch.zeros(len(which), dtype=torch.float64, device=self._device)
        for index in self._validation_batches(len(which)):
            total += self.networks.losses(which, x, y, index)
        # A value that Lightning logs is rounded in the same way.
        means = (total.float() / len(y)).double()
        return self._by_interval([{"val_loss": loss} for loss in means.tolist()])

    def _flat(self, numbers: list[list[int]]) -> Tensor:
        """Return all numbers of kept rows, interval by interval, on the device."""
        return torch.tensor(numbers, device=self._device).flatten()

    def _by_interval(self, values: Sequence[Value]) -> list[list[Value]]:
        """Return the values of the live rows by interval, from one list of all of them."""
        rows = len(self.networks.live)
        return [list(values[i : i + rows]) for i in range(0, len(values), rows)]

    def _validation_batches(self, networks: int) -> Iterator[Tensor]:
        """Yield the batches of the validation split for some networks, as in Lightning's loop."""
        examples = torch.arange(self._validation_size, device=self._device)
        for index in examples.split(self._eval_batch_size):
            yield index.expand(networks, -1)

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

    def save_if_worth_it(self, row: int, number: int | None = None) -> None:
        """Save a run that ends or pauses here, unless it is faster to train its steps again.

        Args:
            row: The row of the run.
            number: Number of the kept row where it ends; None if it ends in its present state.
        """
        self._save_if_older(row, MIN_SECONDS_WORTH_SAVING, number)

    def _save_if_older(self, row: int, seconds: float, number: int | None = None) -> None:
        """Save a run if its last file is older than `seconds` or than the checkpoint interval."""
        run = self.networks.run_at(row)
        checkpoints = self._training.checkpoints
        if run.file is None or checkpoints is None:
            return
        if time.monotonic() - run.saved_at >= min(seconds, checkpoints.seconds):
            self.networks.write_back(row, number)
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

    def keep(self, interval: int, intervals: int) -> None:
        """Do nothing: a single network is checked after each interval."""
        assert intervals == 1

    def number(self, interval: int, row: int) -> int:
        """Return the number of the only row."""
        return row

    def bytes_of_rows(self) -> int:
        """Return 0, because `keep` copies nothing."""
        return 0

    def write_back(self, row: int, number: int | None = None) -> None:
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
