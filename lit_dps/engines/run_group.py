"""RunGroup: trains runs together from one check to the next, checks them and saves them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from lit_dps.engines.engine import Training
from lit_dps.engines.network_run import CheckOutcome, NetworkRun
from lit_dps.parallel.process import Interrupted
from lit_dps.training.checkpoint_files import MIN_SECONDS_WORTH_SAVING
from lit_dps.training.early_check import Check, HardestFirst
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

    def train(self, x: Tensor, y: Tensor, index: Tensor) -> Tensor:
        """Take optimizer steps; return the loss of each row at the last step, before its update.

        Args:
            x, y: Images and classes of the training split.
            index: Examples of each step: (steps, batch), or (steps, rows, batch) if rows differ.
        """
        ...

    def finite(self) -> list[bool]:
        """Return for each row whether all weights are finite."""
        ...

    def write_back(self, row: int) -> None:
        """Copy the state of a row into the module, optimizer and schedule of its run."""
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
        for row in networks.live:
            self.hardest_first.begin(row, networks.run_at(row).priority)

    @property
    def _validation_size(self) -> int:
        return len(self._validation_split[1])

    def train_interval(self) -> list[CheckOutcome]:
        """Train all runs for `check_interval` steps, and return the outcomes of their checks.

        The best outcome comes first, because it may end the other runs of its cell.
        """
        self.stopwatch.switch_to("training")
        losses = self.networks.train(*self._train_split, self._next_batches()).tolist()
        # The losses were copied from the device, so it has finished the steps.
        self.stopwatch.switch_to("checking")
        finite = self.networks.finite()
        checks = self._check()
        metrics = self._further_metrics()
        self.stopwatch.add_check(self._training.goal.check_interval)
        outcomes = []
        for row, check, values in zip(self.networks.live, checks, metrics, strict=True):
            error = check.error(self._validation_size)
            outcomes.append(CheckOutcome(row, error, check.exact, losses[row], finite[row], values))
        return sorted(outcomes, key=lambda outcome: outcome.error)

    def _next_batches(self) -> Tensor:
        """Return the batches of the next interval.

        Their shape is (steps, batch) if all runs have the same batches, else (steps, rows, batch).
        """
        batches = {row: next(self.networks.run_at(row).batches) for row in self.networks.live}
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
            allowed = []
            for row in networks.live:
                allowed.append(networks.run_at(row).attempt.max_mistakes(self._validation_size))
            return self.hardest_first(
                lambda rows, index: networks.per_example_error(rows, x, y, index),
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
            run.save(self.hardest_first.priority[row])
