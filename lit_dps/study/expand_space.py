"""The box of a study as it is by now: widened by --extend-space, and gone on with by every command
that follows."""

from __future__ import annotations

import dataclasses
import sys

from lit_dps.analysis.analysis import Analysis
from lit_dps.core.errors import StorageError, UserError
from lit_dps.core.record import StudyRecord
from lit_dps.core.space_history import ExpandedSpace, expand_space
from lit_dps.core.trial import Status
from lit_dps.storage.read import read_study
from lit_dps.storage.urls import check_place
from lit_dps.study.setup import StudySetup

OPTION = "--extend-space"


def as_stored(setup: StudySetup, widen: bool) -> StudySetup:
    """A study with the box and the trials that it has by now, once more widened if that is asked
    for.

    The configuration, and with it the identity, keep the first box. Changes nothing in the storage.

    Raises:
        UserError: where there is nothing to widen, or trials are left.
    """
    url, name = setup.storage.optuna_url, setup.study.name
    check_place(url)
    try:
        record = read_study(url, name)
    except StorageError as error:  # there is none yet; what else is wrong with it is told later
        if widen:
            raise UserError(f"{OPTION}: {error}") from None
        return setup
    boxes = record.boxes[1:]
    if widen:
        boxes = (*boxes, _wider(setup, record))
    if not boxes:
        return setup
    trials = max(setup.study.trials, boxes[-1].end)
    now = ", ".join(f"{key} {box}" for key, box in boxes[-1].space.items())
    print(
        f"study {name}: its box is the widened one, {now}; {trials} trials a cell", file=sys.stderr
    )
    return dataclasses.replace(
        setup, study=dataclasses.replace(setup.study, trials=trials), boxes=boxes
    )


def _wider(setup: StudySetup, record: StudyRecord) -> ExpandedSpace:
    if setup.study.sampler != "sobol":
        raise UserError(
            f"{OPTION}: study.sampler {setup.study.sampler} is not allowed; sobol, whose points "
            "fill a box"
        )
    if setup.study.best_of is not None:
        raise UserError(
            f"{OPTION}: study.best_of {setup.study.best_of} is not allowed: widen the box of that "
            "study"
        )
    ended = [
        r for cell in record.cells for r in record.results[cell] if r.status is not Status.FAILED
    ]
    left = len(record.cells) * record.trials - sum(r.trial.point < record.trials for r in ended)
    if left > 0:
        raise UserError(
            f"{OPTION}: {left} trials of study {record.name!r} are left; run it without this first"
        )
    ends: dict[str, set[str]] = {}
    for cell in Analysis(record).cells:
        for key, end in cell.boundary.items():
            ends.setdefault(key, set()).add(end)
    if not ends:
        raise UserError(
            f"{OPTION}: no best value of study {record.name!r} lies near an end of its range"
        )
    if (box := expand_space(record.space, ends, record.trials)) is None:
        raise UserError(f"{OPTION}: {', '.join(ends)} cannot go beyond the ends that they have")
    return box
