"""What keeping a trial costs as a study grows: Optuna's ask and tell and MLflow's run, with made-up
results."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks import made_up
from benchmarks.numbers import Sample, growth
from benchmarks.options import Options
from benchmarks.text import seconds, table
from lit_dps.core.trial import Cell, Trial
from lit_dps.storage.trial_queue import MAX_QUEUED, TrialQueue
from lit_dps.tracking.sync import MlflowSync

TITLE = "Cost of keeping a trial, by how much is kept already"
CELL = Cell(16, 0.0)
CELL_TRIALS = 100  # of each of many cells, as in the paper
CHECKS = (25, 250, 2_500)  # of a trial; 2,500 are the paper's budget
TIMED = 20  # trials whose time is taken at each size
NOISE = 0.1  # an exponent up to this is none: over a factor of 100 in size it makes a factor of 1.6


@dataclass(frozen=True)
class Series:
    """Seconds of one thing at growing sizes.

    Attributes:
        what: What was timed.
        size: What grows.
        sizes: How far.
        seconds: Seconds at each size.
        flat: Whether the target is no growth; else it is growth in proportion at most.
    """

    what: str
    size: str
    sizes: tuple[int, ...]
    seconds: tuple[Sample, ...]
    flat: bool = True

    @property
    def exponent(self) -> float:
        """The seconds grow as size ** exponent."""
        return growth(self.sizes, [sample.median for sample in self.seconds])

    @property
    def target(self) -> float:
        """The largest exponent that is allowed."""
        return NOISE if self.flat else 1 + NOISE


@dataclass(frozen=True)
class Scaling:
    """All series, and the exponent of each."""

    series: tuple[Series, ...]
    exponents: tuple[float, ...]


def measure(options: Options) -> Scaling:
    """Seconds of Optuna's side of a trial and of MLflow's, at each number of trials, cells and
    checks."""
    sizes, timed, checks = options.stored, TIMED, CHECKS
    if options.quick:
        timed, checks = 2, CHECKS[:2]
    one_cell = tuple(zip(*[_one_cell(n, timed) for n in sizes], strict=True))
    waiting = tuple(zip(*[_waiting(n, timed) for n in sizes], strict=True))
    each = min(CELL_TRIALS, min(sizes))
    counts = tuple(n // each for n in sizes)
    cells = tuple(zip(*[_many_cells(n, each, timed) for n in counts], strict=True))
    logged, by_checks = _logging(sizes, checks, timed)
    series = (
        Series("Optuna: tell one, ask the next", "finished trials of the cell", sizes, one_cell[1]),
        Series(
            "Optuna: tell one, ask the next", "points of the cell that are left", sizes, waiting[1]
        ),
        Series(
            "Optuna: tell one, ask the next", f"finished cells of {each} trials", counts, cells[1]
        ),
        Series(
            "Optuna: tell one, ask the next",
            "checks of a trial",
            checks,
            _by_checks(checks, timed),
            flat=False,
        ),
        Series(
            "Optuna: the step to reach, once a second",
            "finished trials of the cell",
            sizes,
            one_cell[2],
        ),
        Series("Optuna: declaring a point", "points of the cell", sizes, waiting[0]),
        Series(
            "Optuna: a worker's first ask",
            "finished trials of the cell",
            sizes,
            one_cell[0],
            flat=False,
        ),
        Series(
            "Optuna: a worker's first ask",
            f"finished cells of {each} trials",
            counts,
            cells[0],
            flat=False,
        ),
        Series("MLflow: logging a trial", "logged trials", sizes, logged),
        Series("MLflow: logging a trial", "checks of a trial", checks, by_checks, flat=False),
    )
    return Scaling(series, tuple(s.exponent for s in series))


def show(found: Scaling) -> str:
    """A row a series."""
    rows = []
    for s in found.series:
        measured = "<br>".join(
            f"{n:,}: {seconds(sample)}" for n, sample in zip(s.sizes, s.seconds, strict=True)
        )
        verdict = (
            "met"
            if s.exponent <= s.target
            else "missed"
            if s.exponent > s.target
            else "one size tells nothing"
        )
        rows.append([s.what, s.size, measured, f"{s.exponent:.2f}", f"{s.target:.1f}: {verdict}"])
    head = ["seconds of", "by", "size: seconds", "exponent", "target, at most"]
    return (
        "Made-up results in SQLite files, nothing is trained. Seconds grow as size to the "
        "exponent: 0 is no growth, 1 "
        f"growth in proportion; {NOISE} on top is taken for noise.\n\n{table(head, rows)}"
    )


def _one_cell(finished: int, timed: int) -> tuple[Sample, Sample, Sample]:
    """Seconds of a first ask, of tell and ask, and of a look at the race, where so many trials are
    finished."""
    with tempfile.TemporaryDirectory() as folder:
        store = made_up.store(folder, finished + timed + 1, [CELL])
        made_up.fill(store, CELL, finished)
        first, laps = _ask_and_tell(store, timed)
        return first, laps, Sample(tuple(_look(store) for _ in range(timed)))


def _waiting(points: int, timed: int) -> tuple[Sample, Sample]:
    """Seconds of declaring a point of a new cell, of which few wait at a time, and of tell and ask
    in it."""
    timed = min(timed, points - 1)
    with tempfile.TemporaryDirectory() as folder:
        first, laps = _ask_and_tell(made_up.store(folder, points, [CELL]), timed)
        return Sample((first.median / min(points, MAX_QUEUED),)), laps


def _many_cells(finished: int, each: int, timed: int) -> tuple[Sample, Sample]:
    """Seconds of a first ask, and of tell and ask, in a new cell after so many finished ones."""
    cells = [Cell(2 + i, 0.0) for i in range(finished + 1)]
    with tempfile.TemporaryDirectory() as folder:
        store = made_up.store(folder, each, cells)
        for cell in cells[:-1]:
            made_up.fill(store, cell, each)
        return _ask_and_tell(store, min(timed, each - 1))


def _by_checks(checks: tuple[int, ...], timed: int) -> tuple[Sample, ...]:
    """Seconds of tell and ask with so many checks a trial."""
    found = []
    for n in checks:
        with tempfile.TemporaryDirectory() as folder:
            found.append(_ask_and_tell(made_up.store(folder, timed + 1, [CELL]), timed, n)[1])
    return tuple(found)


def _next_trial(store: TrialQueue) -> Trial:
    attempt = store.claim_next()
    assert attempt is not None and attempt.trial is not None
    return attempt.trial


def _ask_and_tell(
    store: TrialQueue, trials: int, checks: int = made_up.CHECKS
) -> tuple[Sample, Sample]:
    """Seconds until the first trial is there, and of each tell with the ask after it."""
    begin, laps = time.perf_counter(), []
    trial = _next_trial(store)
    first = time.perf_counter() - begin
    for _ in range(trials):
        result, begin = made_up.result(trial, checks), time.perf_counter()
        store.store_result(result)
        trial = _next_trial(store)
        laps.append(time.perf_counter() - begin)
    return Sample((first,)), Sample(tuple(laps))


def _look(store: TrialQueue) -> float:
    """Seconds to learn the step that trials have to reach."""
    store._limits.clear()  # as if the second had passed in which the last answer serves
    return _seconds(lambda: store.cell_race_limit(CELL))


def _logging(
    sizes: tuple[int, ...], checks: tuple[int, ...], timed: int
) -> tuple[tuple[Sample, ...], tuple[Sample, ...]]:
    """Seconds of logging a trial after so many, and then one with so many checks."""
    logged, by_size, by_checks = 0, [], []
    with tempfile.TemporaryDirectory() as folder:
        mlflow = MlflowSync(f"sqlite:///{folder}/mlflow.db", folder, "made-up", "s", {})
        for n in sorted(sizes):
            _log(mlflow, range(logged, n), checks=1)
            by_size.append(_log(mlflow, range(n, n + timed)))
            logged = n + timed
        for n in checks:
            by_checks.append(_log(mlflow, range(logged, logged + timed), n))
            logged += timed
    return tuple(by_size), tuple(by_checks)


def _log(mlflow: MlflowSync, points: range, checks: int = made_up.CHECKS) -> Sample:
    results = (made_up.result(made_up.trial(CELL, point, points.stop), checks) for point in points)
    return Sample(
        tuple(_seconds(lambda result=result: mlflow.log_trial(result)) for result in results)
    )


def _seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin
