"""How a study is laid out in an Optuna storage, and reading it back as a `StudyRecord`.

A study NAME is a header study of that name (user attributes only) and one study a cell, "NAME | B=16 S=0.9". A trial
of a cell has the user attribute "point" and, once it has finished, "result" as `encode_result` gives it. A trial that
Optuna calls finished but that has no result was interrupted: its point is run again, so it is left out here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Integral

import optuna
from optuna.storages import BaseStorage

from lit_dps.analysis.database_errors import first_line, place, storage_errors
from lit_dps.analysis.racing import fair
from lit_dps.errors import StorageError
from lit_dps.goal import Goal
from lit_dps.space import Range
from lit_dps.storage import sqlite_file
from lit_dps.trial import Cell, Status, Trial, TrialResult

FORMAT = 1
FORMAT_ATTR, POINT_ATTR, RESULT_ATTR = "lit_dps_format", "point", "result"


@dataclass(frozen=True)
class StudyRecord:
    """All that a study knows: what it set out to do and what has been found so far.

    Attributes:
        name: Name of the study.
        workload: Name of the workload.
        goal: When a trial stops.
        space: Range of each metaparameter by configuration key.
        batch_sizes: Batch sizes of the grid, in examples.
        sparsities: Sparsities of the grid, in [0, 1).
        trials: Trials declared for each cell: points 0 to trials - 1.
        seed: The study's seed.
        goals: Further goal errors, above the goal's own, that the same runs answer (`lit_dps.analysis.goals`).
        slack: How far beyond K* trials run, as a multiple of it; None to the step budget (`lit_dps.analysis.racing`).
        config: The configuration it was started with.
        results: Finished trials of every cell of the grid, by point, as they stood at step slack x K*; an empty list
            where none has.
        running: Trials of each cell that are started or queued and not yet finished.
    """

    name: str
    workload: str
    goal: Goal
    space: dict[str, Range]
    batch_sizes: tuple[int, ...]
    sparsities: tuple[float, ...]
    trials: int
    seed: int
    goals: tuple[float, ...]
    slack: float | None
    config: dict
    results: dict[Cell, list[TrialResult]]
    running: dict[Cell, int]

    @property
    def cells(self) -> list[Cell]:
        """The grid, by sparsity, then batch size."""
        return grid(self.batch_sizes, self.sparsities)

    def told(self, cell: Cell) -> list[TrialResult]:
        """The results of a cell but for failed trials: how those would have ended is not known, and they run again."""
        return [result for result in self.results[cell] if result.status is not Status.FAILED]


def grid(batch_sizes, sparsities) -> list[Cell]:
    """All cells, by sparsity, then batch size."""
    return [Cell(b, s) for s in sorted(sparsities) for b in sorted(batch_sizes)]


def cell_study_name(name: str, cell: Cell) -> str:
    """Name of the Optuna study that holds a cell's trials."""
    return f"{name} | {cell}"


def encode_result(result: TrialResult) -> dict:
    """What is stored of a result under `RESULT_ATTR`: plain JSON, without the trial itself.

    Curve values that are not finite become "nan", "inf" and "-inf": not every database's JSON can hold them.
    """
    return {
        "status": str(result.status),
        "steps": None if result.steps is None else int(result.steps),
        "curve": {key: [_encode(x) for x in values] for key, values in result.curve.items()},
        "kept": {key: [int(kept), int(total)] for key, (kept, total) in result.kept.items()},
        "seconds": float(result.seconds),
        "smoothness": {key: [_encode(x) for x in values] for key, values in result.smoothness.items()},
        "theory": {key: _encode(x) for key, x in result.theory.items()},
        "observed": {key: _encode(x) for key, x in result.observed.items()},
        **({"failure": result.failure, "traceback": result.traceback} if result.failure else {}),
    }


def _encode(x: float | int) -> float | int | str:
    return int(x) if isinstance(x, Integral) else float(x) if math.isfinite(x) else str(float(x))


def _decode(x: float | int | str) -> float | int:
    return float(x) if isinstance(x, str) else x


def decode_result(stored: Mapping, trial: Trial) -> TrialResult:
    """The inverse of `encode_result`. Raises KeyError, TypeError, ValueError or AttributeError for anything else."""
    return TrialResult(
        trial=trial,
        status=Status(stored["status"]),
        steps=stored["steps"],
        curve={key: [_decode(x) for x in values] for key, values in stored["curve"].items()},
        kept={key: (kept, total) for key, (kept, total) in stored["kept"].items()},
        seconds=stored["seconds"],
        smoothness={key: [_decode(x) for x in values] for key, values in stored.get("smoothness", {}).items()},
        theory={key: _decode(x) for key, x in stored.get("theory", {}).items()},
        observed={key: _decode(x) for key, x in stored.get("observed", {}).items()},
        failure=stored.get("failure", ""),
        traceback=stored.get("traceback", ""),
    )


def list_studies(storage: BaseStorage | str) -> list[str]:
    """Names of the studies in a storage (an Optuna storage or a URL), sorted. Raises StorageError as `read_study`."""
    with storage_errors(storage), open_to_read(storage) as opened:
        return sorted(_headers(opened))


def read_study(storage: BaseStorage | str, name: str) -> StudyRecord:
    """Reads a study, finished or not; changes nothing in the storage.

    Args:
        storage: An Optuna storage or its URL. A SQLite file that is not there is not created.
        name: The study's name.

    Raises:
        StorageError: in one line, if the storage cannot be read, holds no such study, or holds it in another format.
    """
    with storage_errors(storage), open_to_read(storage) as opened:
        headers = _headers(opened)
        if name not in headers:
            known = ", ".join(sorted(headers)) or "none"
            raise StorageError(f"no study {name!r} in {place(storage)}; studies there: {known}")
        existing = set(optuna.get_all_study_names(opened))
        header = headers[name]
        if header[FORMAT_ATTR] != FORMAT:
            raise StorageError(f"study {name!r} has format {header[FORMAT_ATTR]!r}; this version reads {FORMAT}")
        try:
            cells = grid(header["batch_sizes"], header["sparsities"])
            results, running = dict.fromkeys(cells), dict.fromkeys(cells)
            for cell in cells:
                study = cell_study_name(name, cell)
                trials = optuna.load_study(study_name=study, storage=opened).trials if study in existing else []
                found, running[cell] = _read_cell(trials, cell, header["seed"])
                results[cell] = fair(found, header.get("slack"))
            return StudyRecord(
                name=name,
                workload=header["workload"],
                goal=Goal(**header["goal"]),
                space={key: Range(**value) for key, value in header["space"].items()},
                batch_sizes=tuple(sorted(header["batch_sizes"])),
                sparsities=tuple(sorted(header["sparsities"])),
                trials=header["trials"],
                seed=header["seed"],
                goals=tuple(sorted(header.get("goals", ()), reverse=True)),
                slack=header.get("slack"),
                config=header["config"],
                results=results,
                running=running,
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise StorageError(f"study {name!r} is damaged: {first_line(error)}") from error


def _headers(storage: BaseStorage) -> dict[str, dict]:
    summaries = optuna.get_all_study_summaries(storage, include_best_trial=False)
    return {s.study_name: s.user_attrs for s in summaries if FORMAT_ATTR in s.user_attrs}


def _read_cell(trials: list[optuna.trial.FrozenTrial], cell: Cell, seed: int) -> tuple[list[TrialResult], int]:
    finished, started = {}, set()
    for trial in sorted(trials, key=lambda t: t.number):
        point = trial.user_attrs.get(POINT_ATTR)
        if not trial.state.is_finished():
            started.add(trial.number if point is None else point)
        elif RESULT_ATTR in trial.user_attrs:
            result = decode_result(trial.user_attrs[RESULT_ATTR], Trial(cell, point, trial.params, seed))
            finished[point] = furthest(finished.get(point), result)
    return [finished[point] for point in sorted(finished)], len(started - finished.keys())


def furthest(first: TrialResult | None, second: TrialResult) -> TrialResult:
    """Of two attempts at a point, the one that tells more: an outraced one may be run again and further.

    Whatever came after a failed one replaces it.
    """
    if first is None or first.status is Status.FAILED:
        return second
    further = second.steps_run > first.steps_run or second.status is Status.FAILED
    more = first.status is Status.OUTRACED and further
    return second if more else first


@contextmanager
def open_to_read(storage: BaseStorage | str) -> Iterator[BaseStorage]:
    """An Optuna storage, or the one at a URL, for the time of the body; makes none where there is none.

    Raises:
        StorageError: if there is no such file.
    """
    if not isinstance(storage, str):
        yield storage
        return
    path = sqlite_file(storage)
    if path is not None and not path.is_file():
        raise StorageError(f"no study database at {path}")
    # Reading must not turn somebody else's database into an Optuna one.
    opened = optuna.storages.RDBStorage(storage, skip_table_creation=True)
    try:
        yield opened
    finally:
        opened.engine.dispose()  # a server has so many connections
