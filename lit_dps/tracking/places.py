"""Which trial or repeat a run of MLflow shows, and which attempt at it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from mlflow.entities import Run

from lit_dps.core.trial import Trial, TrialResult
from lit_dps.storage.schema import ATTEMPT_TAG, CELL_TAG, KIND_TAG, POINT_TAG, REPEAT_TAG

Place = tuple[
    str, int, int
]  # the cell as text, the point, and the number of the repeat, 0 for a trial of the search


@dataclass(frozen=True)
class Logged:
    """The attempt that the run of a trial shows: its number, None where an earlier version logged
    it, and its time."""

    attempt: int | None
    seconds: float

    def shows(self, result: TrialResult) -> bool:
        """Whether it is the attempt of a result.

        Attempts of a database that was put back from a copy get the numbers of lost ones: their
        seconds differ.
        """
        other = None not in (self.attempt, result.attempt) and self.attempt != result.attempt
        return not other and math.isclose(self.seconds, result.seconds)


def place(trial: Trial) -> Place:
    """Where a trial is."""
    return str(trial.cell), trial.point, trial.repeat


def tags_of(where: Place) -> dict[str, str]:
    """The tags by which the runs of a trial or a repeat are found, the rarest first."""
    cell, point, repeat = where
    tags = {POINT_TAG: str(point), CELL_TAG: cell, KIND_TAG: "repeat" if repeat else "trial"}
    return ({REPEAT_TAG: str(repeat)} if repeat else {}) | tags


def place_of(tags: Mapping[str, str]) -> Place:
    """The inverse of `tags_of`."""
    return tags[CELL_TAG], int(tags[POINT_TAG]), int(tags.get(REPEAT_TAG, 0))


def logged_in(run: Run) -> Logged:
    """The attempt that a run shows."""
    attempt = run.data.tags.get(ATTEMPT_TAG)
    return Logged(
        None if attempt is None else int(attempt), run.data.metrics.get("seconds", math.inf)
    )
