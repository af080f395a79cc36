"""What tells how many steps a trial is likely to take: finished trials of the study, else probes of
advice; the law."""

from __future__ import annotations

import math
from collections.abc import Mapping

from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.law import Law, fit_law
from lit_dps.analysis.observations import observation_of_cell
from lit_dps.core.record import StudyRecord
from lit_dps.core.trial import Cell, Series
from lit_dps.storage.advice_store import AdviceStore
from lit_dps.storage.read import list_studies, read_study
from lit_dps.storage.schema import PROBES_SUFFIX
from lit_dps.storage.urls import sqlite_file
from lit_dps.study.progress import Ratio
from lit_dps.study.setup import StudySetup

SAME = "model", "data", "goal", "pruning", "optim", "local"  # of an identity, of the same K


def stored_record(setup: StudySetup) -> StudyRecord | None:
    """What is stored of a study; None without it."""
    return _read(setup.storage.optuna_url, setup.study.name)


def nearest_record(setup: StudySetup, record: StudyRecord | None) -> StudyRecord | None:
    """The study's own record where a trial of it has finished; else that of the probes of advice on
    it, if any.

    These have to be of the same module, data and goal, and of the same race: then a trial ends as
    soon there.
    """
    if record is not None and any(map(record.resolved_results, record.cells)):
        return record
    url, name = setup.storage.optuna_url, setup.study.name
    probes = _read(url, f"{name}{PROBES_SUFFIX}")
    if probes is None or probes.race_factor != setup.study.race_factor:
        return record
    theirs: Mapping = AdviceStore(url, name).read().get("configuration", {})
    ours = setup.identity(None)
    same = all(theirs.get(key) == ours.get(key) for key in SAME)
    return probes if same and any(map(probes.resolved_results, probes.cells)) else record


def told_by(setup: StudySetup, record: StudyRecord | None, laws: Mapping[Series, Law]) -> str:
    """Whose trials those of a record are, and how their steps are taken to other batch sizes."""
    count = 0 if record is None else sum(map(len, record.results.values()))
    whose = f"the mean of the finished trials ({count:,}) of the nearest batch size"
    whose += ", along the law of K*" if laws else ""
    if record is not None and record.name != setup.study.name:
        dense = ", of the dense network" if any(setup.study.sparsities) else ""
        whose += f": those of the probes of lit-dps advise{dense}"
    return whose


def laws_of(record: StudyRecord | None) -> dict[Series, Law]:
    """The law of K* of each series that has one, of those that have K* at enough batch sizes."""
    if record is None:
        return {}
    found = {}
    cells = Analysis(record).cells
    for series in record.series:
        of_series = [summary for summary in cells if summary.cell.series == series]
        own = [observation_of_cell(record, summary) for summary in of_series]
        law = fit_law([each for each in own if each is not None])
        if law.fit is not None and not math.isnan(law.reach[0]):
            found[series] = law
    return found


def along_laws(laws: Mapping[Series, Law]) -> Ratio:
    """Steps to the goal of a cell over those of its series at another batch size; 1 where no law
    reaches both.

    A series without a law has the ratio of the first one that has. Trials take time in proportion
    to K*: of a race they run to a multiple of it.
    """

    def ratio(cell: Cell, other: int) -> float:
        for law in (*([laws[cell.series]] if cell.series in laws else []), *laws.values()):
            low, high = law.reach
            if low <= min(cell.batch_size, other) and max(cell.batch_size, other) <= high:
                return float(law.steps(cell.batch_size) / law.steps(other))
        return 1.0

    return ratio


def _read(url: str, name: str) -> StudyRecord | None:
    file = sqlite_file(url)
    if (file is not None and not file.exists()) or name not in list_studies(url):
        return None
    return read_study(url, name)
