"""Forecast of a study before it runs: trials, steps, validations and time."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from lit_dps.analysis.tables import fitted
from lit_dps.core.racing import default_rungs
from lit_dps.core.record import StudyRecord
from lit_dps.core.step_timing import sizes_of
from lit_dps.core.text import WIDTH, format_duration
from lit_dps.core.trial import LIGHTNING, SINGLE, Cell, Trial, Value
from lit_dps.forecast.remaining import (
    Points,
    Runs,
    forecast_basis,
    laws_of,
    nearest_record,
    ratio_by_laws,
    remaining_repeats,
    remaining_trials,
    stored_record,
)
from lit_dps.forecast.step_times import Timing, measure
from lit_dps.pruning import pruner_of
from lit_dps.readings.lipschitz import gammas
from lit_dps.study.noise import MAX_SECONDS
from lit_dps.study.probe_run import LOCAL_START
from lit_dps.study.quiet_timing import MAX_SECONDS as MAX_TIMING_SECONDS
from lit_dps.study.quiet_timing import MAX_SHARE
from lit_dps.study.setup import StudySetup

# Heads of the columns of times.
AT_MOST = "time at most"
EXPECTED = "time expected"
# The largest misfit of two timed batch sizes that is not shown. It is less than times scatter.
LARGEST_MISFIT = 0.03
# The seconds of a run of a cell in a column of times.
SecondsOf = Callable[[Cell, Runs, str], float]
# Columns that are left out, in this order, until the table fits the terminal.
_LESS_NEEDED = ("one validation", "validations", "one step", "steps", "trials")


def forecast(setup: StudySetup, width: int = WIDTH) -> str:
    """Return what remains of a study as text, after a short timing; nothing is stored.

    Args:
        setup: The study, after its checks.
        width: Columns of the terminal, for the table.

    Raises:
        StorageError: If the study is stored and cannot be read.
        CannotTime: If a trial fails.
    """
    record = stored_record(setup)
    results = {}
    if record is not None:
        results = record.results
        # A stored study may race its trials by a larger factor, which is kept.
        setup = setup.with_stored_trials(record).with_study(race_factor=record.race_factor)
    points = setup.remaining_points(results)
    timing = measure(setup)
    lines = [
        f"forecast of study {setup.study.name}; no trial runs, and nothing is stored",
        *_timing_remarks(setup, timing),
        *_omitted_costs(setup, record),
        "",
        *study_table(setup, points, record, timing, nearest_record(setup, record), width),
    ]
    return "\n".join(lines)


def _timing_remarks(setup: StudySetup, timing: Timing) -> list[str]:
    """Return how steps were timed, and what the times assume, a line each."""
    study = setup.study
    batch_sizes = ", ".join(map(str, timing.measured))
    threads = f"{study.threads} thread{'s' * (study.threads != 1)}"
    if len(timing.measured) == 1:
        line = f"a step takes {format_duration(next(iter(timing.measured.values())).step)}"
    else:
        overhead, per_example = format_duration(timing.step.a), format_duration(timing.step.b)
        line = f"a step takes {overhead} + {per_example} x B"
    # Two sizes miss the line if a step grows faster than in proportion, or if it shrinks.
    if len(timing.measured) > 2 or timing.misfit > LARGEST_MISFIT:
        line += f", within {timing.misfit:.0%} of the timed steps"
    largest = max(timing.measured)
    if max(study.batch_sizes) > largest:
        line += f"; times above B = {largest} are extrapolated"
    lines = [f"timed at B = {batch_sizes} with {threads}", line]
    axes = _timed_axes(setup)
    if axes:
        lines.append(f"timed at {_values_text(axes)}; other values may take more or less time")
    sizes = sizes_of(setup.middle, study.space)
    if sizes:
        lines.append(
            f"timed at {_values_text(sizes)}, the middle of the search space; other values may "
            "take more or less time"
        )
    if setup.ranks > 1:
        lines.append(
            f"timed in one process; {setup.ranks} ranks that train a trial together take other "
            "times"
        )
    if setup.built_goal.max_examples is not None:
        lines.append(
            "goal.max_examples allows more steps if batches are smaller than B, such as the last "
            "one of an epoch"
        )
    if setup.built_goal.max_seconds is not None:
        faster = [cell for cell in setup.study.cells if _may_have_faster_steps(setup, cell)]
        if faster:
            lines.append(
                "steps of some cells may be faster than timed; the table counts them without the "
                "limit goal.max_seconds"
            )
    if setup.grows_batches:
        lines.append(
            "timed at the batch size of each cell; smaller batches of batch.schedule take less time"
        )
    if study.engine not in (SINGLE, LIGHTNING):
        lines.append(f"timed one trial at a time; study.engine = {study.engine} may be faster")
    if setup.workers > 1:
        lines.append(
            f"{setup.workers} trials at a time; each is assumed to be as fast as one alone"
        )
    if setup.goal.stops_validations_early:
        lines.append("validations that stop early take less time")
    if study.race_factor is not None:
        lines.append(
            "study.race_factor stops trials that cannot win, so the real time will be shorter"
        )
    return lines


def _timed_axes(setup: StudySetup) -> dict[str, Value]:
    """Return the axes that the timed trials have a value of.

    Batches are constant there, and workers of local SGD separate before the first step.
    """
    axes = {}
    for key, value in setup.study.cells[0].axes:
        if key != LOCAL_START and not key.startswith("batch."):
            axes[key] = value
    return axes


def _values_text(values: Mapping[str, object]) -> str:
    """Return values by key as text: "model.width = 256, model.depth = 2"."""
    return ", ".join(f"{key} = {value}" for key, value in values.items())


def _omitted_costs(setup: StudySetup, record: StudyRecord | None) -> list[str]:
    """Return what the times leave out, a line each."""
    lines = []
    if setup.study.noise_scale and (record is None or record.noise is None):
        lines.append(f"these times exclude the noise scale: at most {MAX_SECONDS:.0f} s, once")
    if setup.study.readings:
        lines.append("these times exclude study.readings")
    config = setup.smoothness
    if config.interval is not None:
        measurements = setup.built_goal.max_steps // config.interval
        passes = len(gammas(config.delta, config.last)) + 1
        examples = "all training examples"
        if config.examples is not None:
            examples = f"{config.examples:,} training examples"
        noise = ""
        if config.noise:
            noise = " and a pass of per-example gradients"
        lines.append(
            f"these times exclude smoothness: at most {measurements:,} measurements per trial, "
            f"each of {passes} passes{noise} over {examples}, and a pass of per-example gradients "
            "before the first step"
        )
    changing = _methods_that_change_masks(setup)
    if changing:
        lines.append(
            f"these times exclude the changes of masks during training by {', '.join(changing)}"
        )
    lines.append(
        "these times exclude the timing of steps after the trials: about "
        f"{MAX_TIMING_SECONDS:.0f} s at most, or {MAX_SHARE:.0%} of the trials' time"
    )
    return lines


def _methods_that_change_masks(setup: StudySetup) -> list[str]:
    """Return the pruning methods whose masks change during training, each once."""
    methods: dict[str, None] = {}
    settings = setup.trial_settings()
    for cell in setup.study.cells:
        config = settings.resolve(Trial(cell, 0, setup.middle)).pruning
        if cell.sparsity > 0 and pruner_of(config.method, config.options).every is not None:
            methods[config.method] = None
    return list(methods)


@dataclass(frozen=True)
class _Remaining:
    """What remains of a study.

    Attributes:
        check_interval: Steps between two validations.
        timing: How long things take here.
        workers: Trials that run at a time.
        stack_size: The trials that a worker trains at once at most.
        trials, repeats: The trials and the repeats that remain, by cell.
        most_training: Seconds that a trial trains at most from a start, by cell, if the goal limits
            them.
        heads: The heads of the times.
    """

    check_interval: int
    timing: Timing
    workers: int
    stack_size: int
    trials: Mapping[Cell, Runs]
    repeats: Mapping[Cell, Runs]
    most_training: Mapping[Cell, float]
    heads: Sequence[str]

    @property
    def has_trials(self) -> bool:
        return any(runs.count for runs in self.trials.values())

    @property
    def has_repeats(self) -> bool:
        return any(runs.count for runs in self.repeats.values())

    @property
    def pruned(self) -> int:
        """The number of sparse trials and repeats, which prune their networks."""
        count = 0
        for cell, runs in [*self.trials.items(), *self.repeats.items()]:
            if cell.sparsity > 0:
                count += runs.count
        return count

    def row(
        self,
        name: str,
        trials: Mapping[Cell, Runs],
        repeats: Mapping[Cell, Runs],
        seconds_of: SecondsOf,
    ) -> dict:
        """Return a row of the table: the sums over some trials and repeats.

        Args:
            name: The row's first entry.
            trials, repeats: Those that count.
            seconds_of: Returns the seconds of a run.
        """
        runs = [*trials.values(), *repeats.values()]
        steps = sum(each.count * each.most_steps for each in runs)
        row = {
            "B": name,
            "trials": f"{sum(each.count for each in runs):,}",
            "steps": f"{steps:,.0f}",
            "validations": f"{steps / self.check_interval:,.0f}",
            "one step": "",
            "one validation": "",
        }
        for head in self.heads:
            row[head] = format_duration(self._seconds(trials, repeats, head, seconds_of))
        return row

    def _seconds(
        self,
        trials: Mapping[Cell, Runs],
        repeats: Mapping[Cell, Runs],
        head: str,
        seconds_of: SecondsOf,
    ) -> float:
        """Return the seconds in which the workers run some trials and repeats.

        At most, the longest trial begins last. A worker without work ends although trials of other
        workers run. So one worker may run all repeats that follow trials.
        """
        shared, longest = _total_and_longest(trials, head, seconds_of)
        serial, longest_repeat = _total_and_longest(repeats, head, seconds_of)
        if head == EXPECTED:
            return (shared + serial) / self.workers
        if not self.has_trials:
            shared, longest, serial = serial, longest_repeat, 0.0
        last = min(shared, self.stack_size * longest)
        return shared / self.workers + (1 - 1 / self.workers) * last + serial

    def total_seconds(self, cell: Cell, runs: Runs, head: str) -> float:
        """Return the seconds of a run, with pruning."""
        return self.run_seconds(cell, runs, head) + self.pruning_seconds(cell, runs, head)

    def run_seconds(self, cell: Cell, runs: Runs, head: str) -> float:
        """Return the seconds of a run, without pruning."""
        steps, starts = _steps_and_starts(runs, head)
        training = steps * self.timing.step_seconds(cell.batch_size)
        training = min(training, starts * self.most_training.get(cell, math.inf))
        validations = steps / self.check_interval * self.timing.check_seconds(cell.batch_size)
        return starts * self.timing.start + training + validations

    def pruning_seconds(self, cell: Cell, runs: Runs, head: str) -> float:
        """Return the seconds in which a run prunes its network."""
        if cell.sparsity == 0:
            return 0.0
        _, starts = _steps_and_starts(runs, head)
        return starts * self.timing.pruning


def _steps_and_starts(runs: Runs, head: str) -> tuple[float, int]:
    """Return the steps and the starts of a run in a column of times."""
    if head == EXPECTED and runs.expected_steps is not None:
        return runs.expected_steps, 1
    return runs.most_steps, runs.starts


def _total_and_longest(
    runs: Mapping[Cell, Runs], head: str, seconds_of: SecondsOf
) -> tuple[float, float]:
    """Return the seconds of all runs together, and of the longest one, in a column of times."""
    total = 0.0
    longest = 0.0
    for cell, of_cell in runs.items():
        if of_cell.count:
            seconds = seconds_of(cell, of_cell, head)
            total += of_cell.count * seconds
            longest = max(longest, seconds)
    return total, longest


def study_table(
    setup: StudySetup,
    points: Points,
    record: StudyRecord | None,
    timing: Timing,
    basis: StudyRecord | None,
    width: int = WIDTH,
) -> list[str]:
    """Return the lines of the table, and what its columns are.

    Args:
        setup: The study, after its checks.
        points: The points that are still to run, of every cell.
        record: What is stored of it; None without anything.
        timing: How long things take here.
        basis: Whose trials an expectation rests on (`remaining.nearest_record`).
        width: Columns of the terminal.
    """
    laws = laws_of(basis)
    ratio = ratio_by_laws(laws)
    plan = setup.study.repeat_plan
    pauses = _rungs(setup)
    goal = setup.built_goal
    interval = goal.check_interval
    most_steps = {}
    with_pauses = {}
    starts = {}
    most_training = {}
    for cell in points:
        # The faster a step, the more steps and validations are within `goal.max_seconds`.
        least_seconds = 0.0
        if not _may_have_faster_steps(setup, cell):
            least_seconds = timing.least_step(cell.batch_size)
        steps = setup.most_steps(cell, least_seconds)
        reached = [pause for pause in pauses if pause < steps]
        most_steps[cell] = steps
        with_pauses[cell] = steps + sum(reached)
        starts[cell] = len(reached) + 1
        if goal.max_seconds is not None:
            # A run ends at the first validation after its seconds are spent.
            most_training[cell] = goal.max_seconds + interval * timing.step_seconds(cell.batch_size)
    trials = {}
    for cell, runs in remaining_trials(points, with_pauses, basis, ratio).items():
        trials[cell] = dataclasses.replace(runs, starts=starts[cell])
    repeats = remaining_repeats(plan, points, most_steps, record, basis, ratio)
    heads = [AT_MOST]
    if any(runs.expected_steps is not None for runs in trials.values()):
        heads.append(EXPECTED)
    count = sum(runs.count for runs in [*trials.values(), *repeats.values()])
    workers = min(setup.workers, max(1, count))
    remaining = _Remaining(
        interval, timing, workers, setup.stack_size, trials, repeats, most_training, heads
    )
    lines = fitted(_rows(remaining), _LESS_NEEDED, width)
    if not count:
        return [*lines, "", "all trials and repeats have finished"]
    basis_text = forecast_basis(setup, basis, laws)
    return [*lines, "", *_explain(setup, remaining, basis_text)]


def _may_have_faster_steps(setup: StudySetup, cell: Cell) -> bool:
    """Return True if steps of a cell may be faster than those of the timed trials.

    Ranks, other sizes of the network, smaller batches, no mask and synchronous steps may make a
    step faster. Timed trials of a study with sparse cells have masks (`step_times.measure`).
    """
    if setup.ranks > 1 or sizes_of(setup.middle, setup.study.space):
        return True
    if cell.sparsity == 0 and max(setup.study.sparsities) > 0:
        return True
    if not setup.batch.with_axes(cell.axes).build().is_constant:
        return True
    settings = setup.trial_settings().resolve(Trial(cell, 0, setup.middle))
    if settings.local.on and settings.local.start > 0:
        return True
    axes = dict(cell.axes)
    for key, value in _timed_axes(setup).items():
        # Timed trials prune by magnitude, which costs steps no time.
        if not key.startswith("pruning.") and axes[key] != value:
            return True
    return False


def _rungs(setup: StudySetup) -> Sequence[float]:
    """Return the steps after which the race pauses trials."""
    if setup.study.race_factor is None:
        return ()
    goal = setup.built_goal
    return default_rungs(goal.check_interval, goal.max_steps)[:-1]


def _rows(remaining: _Remaining) -> list[dict[str, str]]:
    """Return the rows of the table: batch sizes, repeats, pruning, the total."""
    trials, repeats = remaining.trials, remaining.repeats
    timing = remaining.timing
    rows = []
    for batch_size in sorted({cell.batch_size for cell in remaining.trials}):
        cells = {cell: runs for cell, runs in trials.items() if cell.batch_size == batch_size}
        row = remaining.row(str(batch_size), cells, {}, remaining.run_seconds)
        row["one step"] = format_duration(timing.step_seconds(batch_size))
        row["one validation"] = format_duration(timing.check_seconds(batch_size))
        rows.append(row)
    if remaining.has_repeats:
        rows.append(remaining.row("repeats", {}, repeats, remaining.run_seconds))
    if remaining.pruned:
        row = remaining.row("pruning", trials, repeats, remaining.pruning_seconds)
        rows.append(row | {"trials": f"{remaining.pruned:,}", "steps": "", "validations": ""})
    rows.append(remaining.row("total", trials, repeats, remaining.total_seconds))
    return rows


def _explain(setup: StudySetup, remaining: _Remaining, basis: str) -> list[str]:
    """Return what the columns of times assume."""
    goal = setup.built_goal
    lines = []
    if not remaining.has_trials:
        lines.append("all trials of the search have finished; repeats remain")
    else:
        ends = f"runs to max_steps = {goal.max_steps:,}"
        if goal.limits:
            ends = f"spends its budget of {goal.budget_text}"
        if _rungs(setup):
            pauses = ", ".join(map("{:,}".format, _rungs(setup)))
            ends = f"restarts from its first step after each rung ({pauses} steps), then {ends}"
        if remaining.workers > 1:
            ends += "; the longest trial begins last"
        lines.append(f"at most: every trial {ends}")
        if EXPECTED in remaining.heads:
            steps = sum(
                runs.count * (runs.expected_steps or 0) for runs in remaining.trials.values()
            )
            lines.append(f"expected: {steps:,.0f} steps, from {basis}")
        else:
            lines.append(
                "An expected time needs finished trials: start the study, or run lit-dps advise "
                "with it"
            )
    if remaining.has_repeats:
        end = f"runs to {goal.budget_text}"
        text = f"repeats, at most: every repeat {end}"
        if remaining.has_trials and setup.workers > 1:
            text = f"repeats, at most: one worker runs all repeats, and each {end}"
        if setup.study.repeat_plan.slack is not None:
            text += f", or to {setup.study.repeat_plan.slack:g} x K* if its cell has one"
        lines.append(text)
    if remaining.pruned:
        lines.append(
            "pruning: each sparse trial prunes its network at each start; trials that share scores "
            "take less time"
        )
    return lines
