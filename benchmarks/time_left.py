"""How right the remaining time of a study is, on replays of stored studies.

`python -m benchmarks.time_left FILE ...` replays other studies: SQLite files, or such files packed
by xz. A replay takes from each stored trial where it met the goal or diverged, and from each
cell the median seconds of a step. Everything else is simulated: the racing, the order of the
trials, the clock, and where the trials would have ended that a race stopped.
"""

from __future__ import annotations

import heapq
import lzma
import math
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from benchmarks.options import Options
from benchmarks.text import table
from lit_dps.core.racing import CellCoverage, default_rungs, next_rung, reruns_above
from lit_dps.core.record import StudyRecord
from lit_dps.core.statistic import MINIMUM
from lit_dps.core.trial import Cell, Status, Trial, TrialResult
from lit_dps.storage.read import list_studies, read_study
from lit_dps.study.progress import Progress, RunPlan
from lit_dps.study.progress_event import ProgressEvent
from lit_dps.study.remaining_time import TimeRemaining

TITLE = "Remaining time of a study"
STUDIES = Path(__file__).parents[1] / "docs" / "replication" / "studies"
# Studies of many cells, of few cells, with races of factor 1, 2 and 4, and without a race.
REPLAYED = (
    "paper-mnist-momentum-100",
    "paper-mnist-sgd",
    "paper-fashion-mnist-momentum",
    "replication-mnist-momentum",
    "replication-fashion-mnist-momentum",
    "paper-mnist-sgd-levels",
    "replication-cifar-10-nesterov",
)
QUICK_REPLAYED = REPLAYED[-2:]
SHARES = (0.1, 0.25, 0.5, 0.75)
FIRST_SECONDS = 60.0
# An estimate is right within this factor, and a lower bound below this ratio.
MAX_RATIO = 2.0
MAX_BOUND_RATIO = 1.25
MOST_K_STARS = 8.0
GOLDEN_RATIO = 0.618034
EVENT_SECONDS = 5.0  # between two events of a running trial
SET_UP_SECONDS = 0.1  # of a trial
# Of a step of a stack: the share of a single network's step that each network of it takes.
STACKED_SHARE = 0.05


class End(NamedTuple):
    """Where a trial ends if nothing stops it: its status, and the step."""

    status: Status
    step: float


@dataclass(frozen=True)
class Recorded:
    """What a replay takes from a study.

    Attributes:
        name: Its name.
        ends: The end of each trial, by cell.
        step_seconds: Seconds of a step of a single network, with its share of checks, by cell.
        max_steps: The step budget.
        check_interval: Steps between two checks.
        race_factor: As in `RunPlan`.
    """

    name: str
    ends: Mapping[Cell, Sequence[End]]
    step_seconds: Mapping[Cell, float]
    max_steps: int
    check_interval: int
    race_factor: float | None

    @property
    def most_stackable(self) -> int:
        """The largest number of trials of one batch size."""
        trials: Counter[int] = Counter()
        for cell, ends in self.ends.items():
            trials[cell.batch_size] += len(ends)
        return max(trials.values())

    def plan(self) -> RunPlan:
        """Return the plan of a run of this study."""
        points = len(next(iter(self.ends.values())))
        return RunPlan(dict.fromkeys(self.ends, self.max_steps), points, self.race_factor)


def recorded(record: StudyRecord) -> Recorded:
    """Return what a replay takes from a stored study: its cells with all their trials."""
    goal = record.goal
    ends = {}
    step_seconds = {}
    for cell in sorted(record.cells, key=lambda cell: (cell.batch_size, cell.axes, cell.sparsity)):
        results = record.results[cell]
        if len(results) < record.trials:
            continue
        k_star = min((result.steps for result in results if result.steps), default=goal.max_steps)
        ends[cell] = []
        for result in sorted(results, key=lambda result: result.trial.point):
            ends[cell].append(_end(result, k_star, goal.check_interval))
        seconds = [result.seconds / result.steps_run for result in results if result.steps_run]
        step_seconds[cell] = statistics.median(seconds)
    return Recorded(
        record.name, ends, step_seconds, goal.max_steps, goal.check_interval, record.race_factor
    )


def _end(result: TrialResult, k_star: int, check_interval: int) -> End:
    """Return where a trial ends. A trial that the race stopped meets the goal at 1 to 8 x K*.

    Its end is unknown, so that it is made up: evenly in the logarithm, by the number of its point.
    """
    if result.status is not Status.OUTRACED:
        return End(result.status, result.steps_run)
    share = result.trial.point * GOLDEN_RATIO % 1
    steps = max(result.steps_run, k_star * MOST_K_STARS**share)
    return End(Status.COMPLETE, check_interval * math.ceil(steps / check_interval))


@dataclass
class Running:
    """A running trial of a replay."""

    trial: Trial
    pause_at: float
    step: int = 0
    seconds: float = 0.0
    reported_at: float = 0.0


@dataclass
class Queue:
    """Hands out the trials of a replay in the order of `lit_dps.storage.trial_queue`."""

    study: Recorded
    coverage: dict[Cell, CellCoverage] = field(default_factory=dict)
    costs: dict[Cell, dict[int, int]] = field(default_factory=dict)

    def __post_init__(self):
        self.rungs: list[float] = [math.inf]
        if self.study.race_factor is not None:
            self.rungs = default_rungs(self.study.check_interval, self.study.max_steps)
        for cell in self.study.ends:
            self.coverage[cell] = CellCoverage()
            self.costs[cell] = {}

    def limit(self, cell: Cell) -> float:
        """Return the race limit of a cell."""
        if self.study.race_factor is None:
            return math.inf
        return MINIMUM.race_limit(list(self.costs[cell].values()), self.study.race_factor)

    def claim(self, batch_size: int | None) -> Running | None:
        """Return the next trial; None if none remains, or if it has another batch size."""
        for cell, ends in self.study.ends.items():
            coverage = self.coverage[cell]
            limit = self.limit(cell)
            points = coverage.points_short_of_limit(len(ends), limit)
            if limit == math.inf:
                points = coverage.points_short_of_rung(len(ends), self.rungs).points
            if points and batch_size not in (None, cell.batch_size):
                return None
            if points:
                nearest = self._costs_of_nearest(cell)
                point = min(points, key=lambda point: (nearest.get(point, math.inf), point))
                coverage.taken.add(point)
                rung = next_rung(coverage.reruns_above_step.get(point, -math.inf), self.rungs)
                return Running(Trial(cell, point), rung)
        return None

    def end(self, result: TrialResult) -> None:
        """Store a result."""
        cell, point = result.trial.cell, result.trial.point
        covered = reruns_above(result.status, result.steps_run)
        self.coverage[cell].taken.discard(point)
        self.coverage[cell].add(point, covered, covered)
        if result.steps is not None:
            self.costs[cell][point] = result.steps

    def _costs_of_nearest(self, cell: Cell) -> Mapping[int, int]:
        if self.study.race_factor is None:
            return {}

        def distance(other: Cell) -> tuple[float, float]:
            ratio = abs(math.log(other.batch_size / cell.batch_size))
            return ratio, abs(other.sparsity - cell.sparsity)

        for other in sorted(self.costs, key=distance):
            if self.costs[other] and other != cell:
                return self.costs[other]
        return {}


class Estimate(NamedTuple):
    """What a replay estimated at a time."""

    time: float
    remaining: TimeRemaining | None


class Replay:
    """Replays a study, and estimates its remaining time along the way.

    Args:
        study: The study.
        stack_size: The largest number of networks of a stack; 1 trains one after another.
        workers: The number of processes.

    Attributes:
        time: Seconds since the run began.
    """

    def __init__(self, study: Recorded, stack_size: int, workers: int):
        self.study = study
        self.stack_size = stack_size
        self.workers = workers
        self.time = 0.0
        self.queue = Queue(study)
        plan = study.plan()
        self.progress = Progress(plan, now=lambda: self.time)

    def run(self, estimate_seconds: Callable[[float], float]) -> list[Estimate]:
        """Run the study and return an estimate every so many seconds, by the time so far."""
        estimates = [Estimate(0.0, None)]
        stacks: list[list[Running]] = [[] for _ in range(self.workers)]
        due = [(0.0, number) for number in range(self.workers)]
        while due:
            self.time, number = heapq.heappop(due)
            if self.time - estimates[-1].time >= estimate_seconds(self.time):
                estimates.append(Estimate(self.time, self.progress.time_remaining()))
            seconds = self._interval(stacks[number], number)
            if seconds is not None:
                heapq.heappush(due, (self.time + seconds, number))
        return estimates

    def _interval(self, stack: list[Running], worker: int) -> float | None:
        """Train a stack to its next check; return its seconds, or None if no trial remains."""
        for running in list(stack):
            self._check(stack, running, worker)
        begun = 0
        while len(stack) < self.stack_size:
            batch_size = stack[0].trial.cell.batch_size if stack else None
            running = self.queue.claim(batch_size)
            if running is None:
                break
            self.progress.on_event(ProgressEvent(worker, running.trial))
            stack.append(running)
            begun += 1
        if not stack:
            return None
        single = self.study.step_seconds[stack[0].trial.cell]
        step = single
        if self.stack_size > 1:
            step = single * (1 + STACKED_SHARE * (len(stack) - 1))
        seconds = step * self.study.check_interval + begun * SET_UP_SECONDS
        for running in stack:
            running.step += self.study.check_interval
            running.seconds += seconds
        return seconds

    def _check(self, stack: list[Running], running: Running, worker: int) -> None:
        """Record a check of a trial."""
        trial = running.trial
        status = self._status(running)
        if status is None:
            if self.time - running.reported_at >= EVENT_SECONDS or not running.reported_at:
                self.progress.on_event(ProgressEvent(worker, trial, running.step))
                running.reported_at = self.time
            return
        stack.remove(running)
        steps = running.step if status is Status.COMPLETE else None
        curve = {"step": [float(running.step)]}
        result = TrialResult(trial, status, steps, curve, seconds=running.seconds)
        self.queue.end(result)
        self.progress.add(result)

    def _status(self, running: Running) -> Status | None:
        """Return how a trial ends at its check; None if it continues."""
        end = self.study.ends[running.trial.cell][running.trial.point]
        if running.step >= end.step:
            return end.status
        if running.step >= self.study.max_steps:
            return Status.INCOMPLETE
        limit = self.queue.limit(running.trial.cell)
        if running.step >= limit:
            return Status.OUTRACED
        if running.step >= running.pause_at and limit == math.inf:
            return Status.PAUSED
        return None


@dataclass(frozen=True)
class Found:
    """What was found.

    Attributes:
        replays: A row a replay: study, networks of a stack, workers, hours, and what was estimated
            after a minute and at shares of the run, as `text_of` writes it.
        estimates: How many estimates were made after the first minute, how many of them were given
            as lower bounds, and how many times the time was unknown.
        right: Estimates within a factor of 2 of the true remaining time, bounds excluded.
        true_bounds: Lower bounds of at most 1.25 times the true remaining time.
    """

    replays: list[dict]
    estimates: int
    bounds: int
    unknown: int
    right: int
    true_bounds: int


def measure(options: Options) -> Found:
    """Replay the studies one trial after another, by two workers, and in stacks."""
    names = QUICK_REPLAYED if options.quick else REPLAYED
    return judge([load(STUDIES / f"{name}.db.xz") for name in names])


def load(path: Path) -> Recorded:
    """Return what a replay takes from a study in a SQLite file, which xz may have packed."""
    if path.suffix != ".xz":
        return _read(path)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / path.stem
        file.write_bytes(lzma.decompress(path.read_bytes()))
        return _read(file)


def _read(file: Path) -> Recorded:
    url = f"sqlite:///{file.resolve()}"
    return recorded(read_study(url, list_studies(url)[0]))


def judge(studies: Sequence[Recorded]) -> Found:
    """Replay some studies and compare their estimates with the true remaining time."""
    rows = []
    counts: Counter[str] = Counter()
    for study in studies:
        for networks, workers in ((1, 1), (1, 2), (64, 1), (64, 2)):
            stack_size = min(networks, math.ceil(study.most_stackable / workers))
            replay = Replay(study, stack_size, workers)
            # At most a few hundred estimates of a replay, evenly in the logarithm of the time.
            estimates = replay.run(lambda seconds: max(1.0, seconds / 30))
            rows.append(
                {
                    "study": study.name,
                    "networks of a stack": stack_size,
                    "workers": workers,
                    "hours": f"{replay.time / 3600:.2g}",
                    **_at_times(estimates, replay.time),
                }
            )
            counts += _counts(estimates, replay.time)
    return Found(
        rows,
        counts["estimates"],
        counts["bounds"],
        counts["unknown"],
        counts["right"],
        counts["true bounds"],
    )


def _at_times(estimates: Sequence[Estimate], total: float) -> dict[str, str]:
    """Return what was estimated after a minute, and at shares of a run."""
    times = {"1 min": FIRST_SECONDS}
    for share in SHARES:
        times[f"{share:.0%}"] = share * total
    texts = {}
    for name, time in times.items():
        nearest = min(estimates, key=lambda estimate: abs(estimate.time - time))
        texts[name] = text_of(nearest, total)
    return texts


def text_of(estimate: Estimate, total: float) -> str:
    """Return the ratio of estimated and true remaining time; "?" if it was unknown."""
    if estimate.remaining is None:
        return "?"
    ratio = estimate.remaining.seconds / (total - estimate.time)
    return f"{'>= ' * estimate.remaining.is_lower_bound}{ratio:.2f}"


def _counts(estimates: Sequence[Estimate], total: float) -> Counter[str]:
    """Return how many estimates after the first minute are right; see `Found`.

    In the last twentieth of a run, seconds decide.
    """
    counts: Counter[str] = Counter()
    for estimate in estimates:
        if not FIRST_SECONDS <= estimate.time <= 0.95 * total:
            continue
        if estimate.remaining is None:
            counts["unknown"] += 1
            continue
        ratio = estimate.remaining.seconds / (total - estimate.time)
        if estimate.remaining.is_lower_bound:
            counts["bounds"] += 1
            counts["true bounds"] += ratio <= MAX_BOUND_RATIO
        else:
            counts["estimates"] += 1
            counts["right"] += 1 / MAX_RATIO <= ratio <= MAX_RATIO
    return counts


def show(found: Found) -> str:
    """Return the tables."""
    lines = [
        "Estimated over true remaining time, in replays of stored studies on a simulated clock: a "
        "minute after the start, and at shares of the run. `>=` marks a lower bound, and `?` a "
        "time that was given as unknown.",
        "",
        table(list(found.replays[0]), [list(row.values()) for row in found.replays]),
        "",
        f"After the first minute, {found.right} of {found.estimates} estimates were within a "
        f"factor of {MAX_RATIO:g}; {found.true_bounds} of {found.bounds} lower bounds were at most "
        f"{MAX_BOUND_RATIO:g} times the true time; {found.unknown} times it was unknown.",
    ]
    return "\n".join(lines)


def main(paths: Sequence[str]) -> None:
    """Replay the studies of some files, by default the stored ones, and print the tables."""
    studies = [load(Path(path)) for path in paths]
    if not studies:
        studies = [load(STUDIES / f"{name}.db.xz") for name in REPLAYED]
    print(show(judge(studies)))


if __name__ == "__main__":
    main(sys.argv[1:])
