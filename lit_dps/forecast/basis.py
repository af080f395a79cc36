"""What an expectation rests on: finished trials of the study, else probes of advice, and laws."""

from __future__ import annotations

import math
from collections.abc import Mapping

from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.law import Law
from lit_dps.core.record import StudyRecord
from lit_dps.core.trial import Cell, Series
from lit_dps.storage.advice_store import AdviceStore
from lit_dps.storage.read import list_studies, read_study
from lit_dps.storage.schema import PROBES_SUFFIX
from lit_dps.storage.urls import sqlite_file
from lit_dps.study.progress import Ratio
from lit_dps.study.setup import StudySetup

# Parts of an identity that two studies with the same K* share.
_SHARED_BY_PROBES = ("model", "data", "goal", "pruning", "optim", "local")


def stored_record(setup: StudySetup) -> StudyRecord | None:
    """Return what is stored of a study; None without anything."""
    return _read(setup.storage.optuna_url, setup.study.name)


def nearest_record(setup: StudySetup, record: StudyRecord | None) -> StudyRecord | None:
    """Return the record whose trials an expectation rests on.

    The record of the study if it has a finished trial, else the record of its probes of advice.
    These must have the same module, data and goal, and the same race, so that trials end equally
    soon.

    Args:
        setup: The study.
        record: What is stored of it.

    Returns:
        `record` without such probes.
    """
    if record is not None and _has_result(record):
        return record
    url = setup.storage.optuna_url
    probes = _read(url, f"{setup.study.name}{PROBES_SUFFIX}")
    if probes is None or probes.race_factor != setup.study.race_factor:
        return record
    stored: Mapping = AdviceStore(url, setup.study.name).read().get("configuration", {})
    identity = setup.identity(None)
    is_same = all(stored.get(key) == identity.get(key) for key in _SHARED_BY_PROBES)
    return probes if is_same and _has_result(probes) else record


def forecast_basis(
    setup: StudySetup, record: StudyRecord | None, laws: Mapping[Series, Law]
) -> str:
    """Return which trials an expectation rests on, in words.

    Args:
        setup: The study.
        record: The record of these trials (`nearest_record`).
        laws: The laws that their steps are scaled by.
    """
    count = 0 if record is None else sum(map(len, record.results.values()))
    trials = f"{count:,} finished trials"
    if record is not None and record.name != setup.study.name:
        trials = f"{count:,} finished probes of lit-dps advise"
        if any(setup.study.sparsities):
            trials += " of the dense network"
    text = f"the mean of the {trials}, at the nearest batch size"
    if laws:
        text += ", scaled by the law of K*"
    return text


def laws_of(record: StudyRecord | None) -> dict[Series, Law]:
    """Return the law of each series that has K* at enough batch sizes."""
    if record is None:
        return {}
    laws = {}
    for series, law in Analysis(record).scalings.items():
        if law.fit is not None and not math.isnan(law.reach[0]):
            laws[series] = law
    return laws


def ratio_by_laws(laws: Mapping[Series, Law]) -> Ratio:
    """Return the ratio of steps at two batch sizes of a series, by a law.

    A series without a law has the ratio of the first one with a law. The ratio is 1 if no law
    reaches both batch sizes. Trials take steps in proportion to K*: in a race they run to a
    multiple of it.
    """

    def ratio(cell: Cell, batch_size: int) -> float:
        candidates = list(laws.values())
        if cell.series in laws:
            candidates.insert(0, laws[cell.series])
        for law in candidates:
            low, high = law.reach
            if low <= min(cell.batch_size, batch_size) and max(cell.batch_size, batch_size) <= high:
                return float(law.steps(cell.batch_size) / law.steps(batch_size))
        return 1.0

    return ratio


def _has_result(record: StudyRecord) -> bool:
    """Return True if a trial has finished that did not fail."""
    return any(record.resolved_results(cell) for cell in record.cells)


def _read(url: str, name: str) -> StudyRecord | None:
    """Return a stored study; None if it is not stored."""
    file = sqlite_file(url)
    if file is not None and not file.exists():
        return None
    if name not in list_studies(url):
        return None
    return read_study(url, name)
