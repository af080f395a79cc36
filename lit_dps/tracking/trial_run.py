"""The MLflow run of one trial: which trial and attempt it shows, and what is logged in it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mlflow.entities import Run

from lit_dps.core.trial import Cell, Trial, TrialResult
from lit_dps.storage.schema import (
    ATTEMPT_TAG,
    CELL_TAG,
    FAILURE_TAG,
    KIND_TAG,
    POINT_TAG,
    REPEAT_TAG,
    STATUS_TAG,
)
from lit_dps.tracking.runs import MetricPoint

MAX_TAG_CHARACTERS = 5000  # of a tag's value that every MLflow takes
# The most points of one curve, as many as MLflow's charts draw. 40,000 validations would take 13 MB
# for each trial.
CURVE_POINTS = 1000


class TrialKey(NamedTuple):
    """What identifies a trial or a repeat of a study.

    Attributes:
        cell: The cell as text.
        point: The point.
        repeat: Number of the repeat; 0 for a trial of the search.
    """

    cell: str
    point: int
    repeat: int

    @classmethod
    def of_trial(cls, trial: Trial) -> TrialKey:
        """Return the key of a trial."""
        return cls(str(trial.cell), trial.point, trial.repeat)

    @classmethod
    def of_run(cls, run: Run) -> TrialKey:
        """Return the key of the trial that a run shows."""
        tags = run.data.tags
        return cls(tags[CELL_TAG], int(tags[POINT_TAG]), int(tags.get(REPEAT_TAG, 0)))

    def tags(self) -> dict[str, str]:
        """Return the tags by which the runs of the trial are found, the rarest first."""
        tags = {}
        if self.repeat:
            tags[REPEAT_TAG] = str(self.repeat)
        tags[POINT_TAG] = str(self.point)
        tags[CELL_TAG] = self.cell
        tags[KIND_TAG] = "repeat" if self.repeat else "trial"
        return tags


@dataclass(frozen=True)
class LoggedAttempt:
    """The attempt that the run of a trial shows.

    Attributes:
        attempt: Its number; None if an earlier version logged it.
        seconds: Its wall time.
    """

    attempt: int | None
    seconds: float

    @classmethod
    def of_run(cls, run: Run) -> LoggedAttempt:
        """Return the attempt that a run shows."""
        # MLflow is not migrated: runs of earlier versions have no number of the attempt.
        attempt = run.data.tags.get(ATTEMPT_TAG)
        seconds = run.data.metrics.get("seconds", math.inf)
        return cls(None if attempt is None else int(attempt), seconds)

    def shows(self, result: TrialResult) -> bool:
        """Return True if it is the attempt of a result.

        If a database was restored from a copy, new attempts get the numbers of lost ones. Their
        seconds differ.
        """
        has_numbers = self.attempt is not None and result.attempt is not None
        if has_numbers and self.attempt != result.attempt:
            return False
        return math.isclose(self.seconds, result.seconds)


def run_name(trial: Trial) -> str:
    """Return the name of a trial's run; the point comes first, because lists cut names short."""
    repeat = f" repeat {trial.repeat}" if trial.repeat else ""
    return f"point {trial.point}{repeat} | {trial.cell}"


def trial_tags(result: TrialResult) -> dict[str, str]:
    """Return the tags of a trial's run."""
    tags = TrialKey.of_trial(result.trial).tags()
    tags[STATUS_TAG] = str(result.status)
    if result.attempt is not None:
        tags[ATTEMPT_TAG] = str(result.attempt)
    if result.failure:
        tags[FAILURE_TAG] = result.failure[:MAX_TAG_CHARACTERS]
    return tags


def trial_metrics(result: TrialResult) -> dict[str, float]:
    """Return the metrics of a trial's run that have one value."""
    metrics = {"seconds": result.seconds}
    if result.steps is not None:
        metrics["steps_to_result"] = result.steps
    for name, (kept, _) in result.kept.items():
        metrics[f"kept/{name}"] = kept
    for name, value in result.theory.items():
        metrics[f"theory/{name}"] = value
    for name, value in result.flags.items():
        if math.isfinite(value):
            metrics[f"observed/{name}"] = value
    return metrics


def trial_params(result: TrialResult) -> dict[str, object]:
    """Return the parameters of a trial's run."""
    trial = result.trial
    params = cell_params(trial.cell)
    params["point"] = trial.point
    params |= trial.params
    if trial.repeat:
        params["repeat"] = trial.repeat
    for name, (_, total) in result.kept.items():
        params[f"total/{name}"] = total
    return params


def cell_params(cell: Cell) -> dict[str, object]:
    """Return the parameters of a cell's run."""
    return {"batch_size": cell.batch_size, "sparsity": cell.sparsity, **dict(cell.axes)}


def curve_points(curve: Mapping[str, Sequence[float]]) -> list[MetricPoint]:
    """Return the logged points of a curve."""
    steps = curve.get("step", ())
    points = []
    for name, values in curve.items():
        if name != "step":
            for i in _logged_indices(len(steps)):
                points.append(MetricPoint(name, values[i], int(steps[i])))
    return points


def _logged_indices(length: int) -> Sequence[int]:
    """Return the indices of a curve's logged points: all, or `CURVE_POINTS` evenly spaced ones."""
    if length <= CURVE_POINTS:
        return range(length)
    return [round(i * (length - 1) / (CURVE_POINTS - 1)) for i in range(CURVE_POINTS)]
