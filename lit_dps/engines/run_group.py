"""RunGroup trains runs together from one validation to the next, validates them and saves them.

`single_network` trains a group of one run; `stack` trains larger groups.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lit_dps.core.attempt import Validation
from lit_dps.core.unit import EXAMPLES, SECONDS
from lit_dps.engines.memory import is_out_of_memory
from lit_dps.engines.module_hooks import raise_if_caught
from lit_dps.engines.network_run import ValidationOutcome
from lit_dps.engines.single_network import SingleNetwork
from lit_dps.engines.stack import StackedNetworks
from lit_dps.engines.step_batches import count_examples, join_rows
from lit_dps.engines.trial_settings import RaiseIfStopped, TrialSettings
from lit_dps.module import ImageClassifier, check_labels, is_wrong
from lit_dps.parallel.process import Interrupted
from lit_dps.training.early_validation import HardestFirst, MistakeCount
from lit_dps.training.stopwatch import Stopwatch

# Intervals that a stack trains before it is validated. More of them save no time.
MAX_INTERVALS_AHEAD = 16
# Share of all intervals that rows train beyond their end, on average.
WASTED_SHARE = 0.06
# A signal or a pause waits this long for the end of the intervals.
MAX_SECONDS_AHEAD = 2.0
# Share of the device's free memory for the snapshots of rows.
MEMORY_SHARE_AHEAD = 0.2


class _TrainedIntervals(NamedTuple):
    """Intervals that were trained one after another, and then validated.

    Attributes:
        live: The rows that were live.
        losses: Training loss of the last step of each interval, by row.
        finite: Whether all weights were finite, by snapshot index.
        results: The result of each live row after the first interval, then after the second, and so
            on. A validation that stopped early knows only whether the network has more mistakes
            than the first validation of its row allows.
        metrics: Values of the further metrics, in the order of the results.
        examples: Examples of each interval, by row.
        seconds: Seconds of each interval.
    """

    live: list[int]
    losses: list[list[float]]
    finite: list[bool]
    results: Sequence[MistakeCount | float]
    metrics: Sequence[Mapping[str, float]]
    examples: list[dict[int, int]]
    seconds: float


def best_first(outcomes: Sequence[ValidationOutcome], at_least: bool) -> list[ValidationOutcome]:
    """Return outcomes by the goal's metric, the best one first and nan last.

    Args:
        outcomes: The outcomes.
        at_least: Whether a larger value is better.
    """

    def rank(outcome: ValidationOutcome) -> tuple[bool, float]:
        value = outcome.validation.value
        if at_least:
            value = -value
        return math.isnan(value), value

    return sorted(outcomes, key=rank)


class RunGroup:
    """Trains runs together from one validation to the next, validates them and saves them.

    The caller records the outcomes of the validations in the runs, which decide whether they
    continue.

    Args:
        networks: The networks of the runs.
        settings: The settings of the study.

    Attributes:
        networks: The networks of the runs.
        hardest_first: Orders the validation examples of each row, for early validations.
        stopwatch: Measures the seconds of steps and of validations.
    """

    def __init__(self, networks: SingleNetwork | StackedNetworks, settings: TrialSettings):
        self.networks = networks
        first = networks.run_at(0)
        self._settings = settings
        self._device = first.module.device
        self._eval_batch_size = first.data.eval_batch_size
        self._train_split: tuple[Any, Tensor] = first.data.on_device("train", self._device)
        self._validation_split: tuple[Any, Tensor] = first.data.on_device("val", self._device)
        self._logs_metrics = not isinstance(first.module, ImageClassifier)
        if isinstance(first.module, ImageClassifier):
            check_labels(first.module, self._validation_split[1])
        self._stops_validations_early = (
            settings.goal.stops_validations_early and not self._logs_metrics
        )
        self.stopwatch = Stopwatch()
        self._intervals_done = 0
        rows = len(networks.runs)
        self.hardest_first = HardestFirst(self._validation_size, rows, self._device)

    @property
    def _validation_size(self) -> int:
        return len(self._validation_split[1])

    def choose_intervals(self, requested: int | None = None) -> int:
        """Return how many intervals to train before the next validations.

        Only the end of training depends on a validation, so several intervals can be validated at
        once. A GPU then waits less often for the host. A row that ends has trained some intervals
        in vain, on average less than `WASTED_SHARE` of all. Only a GPU by CUDA gains from it.

        Args:
            requested: How many if nothing acts between two intervals; None to choose.
        """
        done = 0
        for row in self.networks.live:
            run = self.networks.run_at(row)
            if run.readings is not None or run.changes is not None:
                return 1
            done += run.steps // self._settings.goal.check_interval
        if requested is not None:
            return requested
        if self._device.type != "cuda":
            return 1
        intervals = 2 * WASTED_SHARE * done / len(self.networks.live)
        if self._intervals_done:
            seconds = self.stopwatch.training_seconds / self._intervals_done
            intervals = min(intervals, MAX_SECONDS_AHEAD / seconds)
        free, _ = torch.cuda.mem_get_info(self._device)
        intervals = min(intervals, MEMORY_SHARE_AHEAD * free / self.networks.bytes_of_snapshot())
        return max(1, min(int(intervals), MAX_INTERVALS_AHEAD))

    def train_intervals(self, count: int) -> Iterator[list[ValidationOutcome]]:
        """Train all runs for `count` intervals, and validate each run at the end of each.

        Returns:
            The outcomes of each interval, for the runs that are live when they are taken. Record
            them before the outcomes of the next interval are taken.

        Raises:
            NeedsLightning: If a module does what only Lightning's loop supports, even if code of
                the user catches the error.
        """
        with raise_if_caught():
            intervals = self._train_and_validate(count)
        return (self._outcomes(intervals, i) for i in range(count))

    def _train_and_validate(self, count: int) -> _TrainedIntervals:
        seconds_before = self.stopwatch.training_seconds
        interval = self._settings.goal.check_interval
        self.stopwatch.switch_to("training")
        examples = []
        losses = []
        for i in range(count):
            index, examples_of_rows = self._next_batches()
            examples.append(examples_of_rows)
            losses.append(self._train_steps(index, i * interval))
            self.networks.snapshot(i, count)
        all_losses = torch.stack(losses).tolist()
        # The losses were copied from the device, so it has finished the steps.
        self.stopwatch.switch_to("checking")
        live = list(self.networks.live)
        indices = []
        for i in range(count):
            indices += [self.networks.snapshot_index(i, row) for row in live]
        which = torch.tensor(indices, device=self._device)
        finite = self.networks.snapshots.are_finite()
        if self._logs_metrics:
            results, metrics = self._measure(which)
        else:
            results = self._count_mistakes(which)
            metrics = self._further_metrics(which)
        for _ in range(count):
            self.stopwatch.add_validation(interval)
        self._intervals_done += count
        seconds = (self.stopwatch.training_seconds - seconds_before) / count
        return _TrainedIntervals(live, all_losses, finite, results, metrics, examples, seconds)

    def _outcomes(self, intervals: _TrainedIntervals, i: int) -> list[ValidationOutcome]:
        """Return the outcomes after the i-th interval, for the rows that are still live.

        The best outcome comes first, because it may end the other runs of its cell.
        """
        outcomes = []
        at_least = False
        for place, row in enumerate(intervals.live, start=i * len(intervals.live)):
            if self.networks.runs[row] is None:
                continue
            run = self.networks.run_at(row)
            at_least = run.attempt.goal.at_least
            result = intervals.results[place]
            is_exact = True
            if isinstance(result, MistakeCount):
                if self._stops_validations_early:
                    # A run may have met an easier goal at an interval before.
                    allowed = run.attempt.max_mistakes(self._validation_size)
                    result = MistakeCount.of(result.mistakes, allowed, self._validation_size)
                is_exact = result.exact
                result = result.error(self._validation_size)
            snapshot_index = self.networks.snapshot_index(i, row)
            validation = Validation(
                run.steps + self._settings.goal.check_interval,
                result,
                is_exact,
                loss=intervals.losses[i][row],
                weights_finite=intervals.finite[snapshot_index],
                metrics=intervals.metrics[place],
                spent={
                    EXAMPLES.column: intervals.examples[i][row],
                    SECONDS.column: intervals.seconds,
                },
            )
            outcomes.append(ValidationOutcome(row, snapshot_index, validation))
        return best_first(outcomes, at_least)

    def record(self, outcome: ValidationOutcome) -> None:
        """Record a validation in its run, and take the readings of the end if they are due."""
        run = self.networks.run_at(outcome.row)
        run.record(outcome.validation)
        if run.readings is not None and run.readings.is_end_due:
            self.networks.write_back_weights(outcome.row)
            run.read_end()

    def _train_steps(self, index: Any, before: int) -> Tensor:
        """Train the steps of an interval, and take the readings that follow each of them.

        Args:
            index: As in `StackedNetworks.train`.
            before: Steps since the last validation.

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
        """Return the rows with a reading, by the number of steps since the last validation.

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

    def _next_batches(self) -> tuple[Any, dict[int, int]]:
        """Return the batches of the next interval, and how many examples each live row has.

        The batches are as in `StackedNetworks.train`.
        """
        batches = {}
        examples = {}
        for row in self.networks.live:
            batches[row] = next(self.networks.run_at(row).batches)
            examples[row] = count_examples(batches[row])
        joined = join_rows(batches, len(self.networks.runs))
        if isinstance(joined, Tensor):
            joined = joined.to(self._device)
        return joined, examples

    def _count_mistakes(self, which: Tensor) -> list[MistakeCount]:
        """Return the mistakes of snapshots. Early validations stop when the goal is surely missed.

        Args:
            which: The snapshot indices of the live rows after the first interval, then after the
                second, and so on.
        """
        networks = self.networks
        snapshots = networks.snapshots
        x, y = self._validation_split
        if self._stops_validations_early:
            intervals = len(which) // len(networks.live)
            allowed = []
            for row in networks.live:
                allowed.append(networks.run_at(row).attempt.max_mistakes(self._validation_size))
            return self.hardest_first(
                lambda some, index: snapshots.per_example_error(which[some], x, y, index),
                list(networks.live) * intervals,
                allowed * intervals,
            )
        mistakes = torch.zeros(len(which), dtype=torch.int64, device=self._device)
        for index in self._validation_batches(len(which)):
            mistakes += is_wrong(snapshots.per_example_error(which, x, y, index)).sum(1)
        return [MistakeCount(count, exact=True) for count in mistakes.tolist()]

    def _further_metrics(self, which: Tensor) -> Sequence[Mapping[str, float]]:
        """Return `val_loss` of snapshots if the study keeps it, rounded to float32."""
        if not self._settings.metrics:
            return [{}] * len(which)
        x, y = self._validation_split
        total = torch.zeros(len(which), dtype=torch.float64, device=self._device)
        for index in self._validation_batches(len(which)):
            total += self.networks.snapshots.losses(which, x, y, index)
        # A value that Lightning logs is rounded in the same way.
        means = (total.float() / len(y)).double()
        return [{"val_loss": loss} for loss in means.tolist()]

    def _measure(self, which: Tensor) -> tuple[list[float], list[Mapping[str, float]]]:
        """Return the goal's metric of snapshots, as their module logs it; and `study.metrics`.

        Args:
            which: As in `_count_mistakes`.
        """
        assert isinstance(self.networks, StackedNetworks)
        goal = self._settings.goal
        names = list(dict.fromkeys([goal.monitored, *self._settings.metrics]))
        snapshots = self.networks.snapshots
        means = snapshots.logged_metrics(which, self._validation_split[0], names)
        columns = {name: values.tolist() for name, values in means.items()}
        metrics: list[Mapping[str, float]] = []
        for row, value in enumerate(columns[goal.monitored]):
            goal.check_scale(value)
            metrics.append({name: columns[name][row] for name in self._settings.metrics})
        return columns[goal.monitored], metrics

    def _validation_batches(self, networks: int) -> Iterator[Tensor]:
        """Yield the batches of the validation split for some networks, as in Lightning's loop."""
        examples = torch.arange(self._validation_size, device=self._device)
        for index in examples.split(self._eval_batch_size):
            yield index.expand(networks, -1)

    def end_interval(self, raise_if_stopped: RaiseIfStopped) -> None:
        """Call `raise_if_stopped`, and save the live runs whose last checkpoint is old.

        `raise_if_stopped` raises to end the process. Then all live runs that are worth a file are
        saved, unless a second signal requires that the process ends now.
        """
        try:
            raise_if_stopped()
        except BaseException as error:
            ends_now = isinstance(error, Interrupted) and error.now
            if not ends_now:
                for row in self.networks.live:
                    self.save_if_due(row, run_ends=True)
            raise
        for row in self.networks.live:
            self.save_if_due(row)

    def save_if_due(
        self, row: int, snapshot_index: int | None = None, run_ends: bool = False
    ) -> None:
        """Save a run if its file is due (`CheckpointFile.is_due`).

        Args:
            row: The row of the run.
            snapshot_index: The snapshot where it ends; None if it ends in its present state.
            run_ends: Whether the run ends or pauses here.
        """
        run = self.networks.run_at(row)
        if run.file is None or not run.file.is_due(time.monotonic() - run.saved_at, run_ends):
            return
        try:
            self.networks.write_back(row, snapshot_index)
        except RuntimeError as error:
            if is_out_of_memory(error):
                return  # an older file, or none, resumes the run too
            raise
        run.save()
