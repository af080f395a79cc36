"""Expands the search space of a study (--extend-space)."""

from __future__ import annotations

import dataclasses
import sys

from lit_dps.analysis.analysis import Analysis
from lit_dps.core.errors import ConfigError, StorageError, UserError
from lit_dps.core.record import StudyRecord, remaining_points
from lit_dps.core.search_space import ExpandedSpace, expand_space
from lit_dps.storage.read import read_study
from lit_dps.storage.urls import check_place
from lit_dps.study.setup import StudySetup

OPTION = "--extend-space"


def with_stored_space(setup: StudySetup, expands: bool) -> StudySetup:
    """Return a study with the search space and the number of trials that are stored.

    The configuration, and with it the identity, keep the first search space. The storage is not
    changed.

    Args:
        setup: The study as configured.
        expands: Whether to expand the search space once more.

    Raises:
        UserError: if `expands` and there is nothing to expand, or trials remain.
    """
    url, name = setup.storage.optuna_url, setup.study.name
    check_place(url)
    setup.import_classes()
    try:
        record = read_study(url, name)
    except StorageError as error:  # there is no study yet; `declare` reports other errors
        if expands:
            raise UserError(f"{OPTION}: {error}", key=error.key, value=error.value) from None
        return setup
    spaces = record.spaces[1:]
    if expands:
        spaces = (*spaces, _expanded(setup, record))
    if not spaces:
        return setup
    last = spaces[-1]
    trials = max(setup.study.trials, last.end)
    ranges = ", ".join(f"{key} {box}" for key, box in last.space.items())
    print(
        f"study {name}: its search space was expanded to {ranges}; {trials} trials a cell",
        file=sys.stderr,
    )
    return dataclasses.replace(setup.with_study(trials=trials), spaces=spaces)


def _expanded(setup: StudySetup, record: StudyRecord) -> ExpandedSpace:
    """Return the stored search space, expanded at each end that is near a best value."""
    study = setup.study
    if study.sampler != "sobol":
        allowed = f"sobol with {OPTION}, because other samplers do not fill the larger range"
        raise ConfigError("study.sampler", study.sampler, allowed)
    if study.best_of is not None:
        allowed = f"omitted with {OPTION}. Expand the search space of study {study.best_of}"
        raise ConfigError("study.best_of", study.best_of, allowed)
    points = remaining_points(record.trained_cells, record.trials, record.results)
    remaining = sum(len(each) for each in points.values())
    if remaining > 0:
        raise UserError(
            f"{OPTION}: {remaining} trials of study {record.name!r} have no result yet. "
            f"Run the command without {OPTION} first.",
            key=OPTION,
            value=remaining,
        )
    ends: dict[str, set[str]] = {}
    for cell in Analysis(record).cells:
        for key, end in cell.boundary.items():
            ends.setdefault(key, set()).add(end)
    if not ends:
        raise UserError(
            f"{OPTION}: no best value of study {record.name!r} is near an end of its "
            "range, so no wider range is needed.",
            key=OPTION,
            value=record.name,
        )
    expanded = expand_space(record.space, ends, record.trials)
    if expanded is None:
        raise UserError(
            f"{OPTION}: the ranges of {', '.join(ends)} cannot be wider: their ends are "
            "the limits of the values.",
            key=OPTION,
            value=ends,
        )
    return expanded
