"""A grid with a third axis: everything that is computed for a sparsity is computed for a series."""

import dataclasses
import re

import pytest

from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.tables import records
from lit_dps.core.record import StudyRecord
from lit_dps.core.trial import Cell, Series
from lit_dps.replication.appendix import protocol_rows
from lit_dps.replication.claims import judge_claims
from lit_dps.replication.page import replication_page
from lit_dps.replication.parts import Machine, Part
from lit_dps.report.figures import (
    FIGURES,
    drawn,
    lipschitz,
    logs,
    metaparameters,
    optimizers,
    ratios,
    scaling,
)
from lit_dps.report.notebook import Study
from lit_dps.report.publish import publish
from lit_dps.report.text import render
from tests.support.claims import judged
from tests.support.fake_study import GOAL, SPACE, law_results, measured, theory_terms
from tests.support.texts import figure_texts, numbers_in

METHOD = "pruning.method"
LAWS = {
    ("snip", 0.0): (4e4, 60),
    ("snip", 0.9): (8e4, 120),
    ("synflow", 0.0): (4e4, 60),
    ("synflow", 0.9): (2e5, 180),
}
SERIES = [Series(s, ((METHOD, method),)) for s in (0.0, 0.9) for method in ("snip", "synflow")]


def record_of(trials=8, batch_sizes=(16, 64), name="fake"):
    results = {}
    for series in SERIES:
        for b in batch_sizes:
            cell = Cell(b, series.sparsity, series.axes)
            law = LAWS[series.axes[0][1], series.sparsity]
            found = [measured(result) for result in law_results(cell, trials, *law)]
            terms = [
                theory_terms(r.steps_run, lipschitz=[1 + r.trial.cell.sparsity] * 2) for r in found
            ]
            results[cell] = [
                dataclasses.replace(r, flags=t["flags"]) for r, t in zip(found, terms, strict=True)
            ]
    return StudyRecord(
        name=name,
        workload="digits",
        goal=GOAL,
        space=SPACE,
        batch_sizes=batch_sizes,
        sparsities=(0.0, 0.9),
        trials=trials,
        seed=0,
        goals=(),
        race_factor=None,
        config={},
        results=results,
        running=dict.fromkeys(results, 0),
        axes={METHOD: ("snip", "synflow")},
    )


@pytest.fixture(scope="module")
def study():
    return Analysis(record_of())


def test_the_grid_is_the_product_of_all_axes(study):
    record = study.record
    assert record.series == SERIES
    assert list(record.results) == record.cells
    assert [cell.batch_size for cell in record.cells[:4]] == [16, 64, 16, 64]


def test_a_law_is_fitted_for_each_series():
    study = Analysis(record_of(batch_sizes=(16, 32, 64)))
    assert list(study.laws) == SERIES
    fits = {series: study.laws[series].fit for series in SERIES}
    assert fits[SERIES[0]] == fits[SERIES[1]]
    assert fits[SERIES[3]].c1 > 1.5 * fits[SERIES[2]].c1 > 1.5 * fits[SERIES[0]].c1
    rows = records(study.law_table)
    assert list(rows[0])[:3] == ["sparsity", "method", "batch_sizes"]
    assert [(row["sparsity"], row["method"]) for row in rows] == [
        (s.sparsity, s.axes[0][1]) for s in SERIES
    ]


def test_ratios_are_to_the_dense_series_of_the_same_method(study):
    found = {ratio.cell: ratio for ratio in study.ratios}
    assert {cell.series for cell in found} == {*SERIES[2:]}
    for cell, ratio in found.items():
        dense = Cell(cell.batch_size, 0.0, cell.axes)
        assert ratio.value == study.by_cell[cell].k_star / study.by_cell[dense].k_star
    assert list(study.term_ratios["method"].unique()) == ["snip", "synflow"]


def test_the_report_names_each_series(study):
    text = render(study)
    head = text.splitlines()[2].split()
    assert head[:4] == ["B", "S", "method", "K*"]
    (verdict,) = re.findall(r"^  S=0.9 method=synflow  (.*)$", text, re.MULTILINE)
    assert numbers_in(verdict)[0] == 2
    assert re.search(r"^all +0.9 +snip +\d+ +x1.00", text, re.MULTILINE)


def default(figure, study) -> bool:
    return getattr(figure, "by_default", lambda study: True)(study)


def test_every_figure_has_a_curve_for_each_series(study, tmp_path, golden):
    for figure in FIGURES:
        assert figure.missing(study) is None or not default(figure, study)
    golden.check("figures/scaling-axis.txt", figure_texts(drawn(scaling, study)))
    for figure in (scaling, metaparameters, lipschitz, logs, ratios):
        assert {"sparsity", "method", "batch_size"} <= {*figure.rows(study)}
    labels = [text.get_text() for text in drawn(logs, study).legends[0].get_texts()]
    methods = [series.axes[0][1] for series in SERIES]
    assert [label.rpartition(" ")[2] for label in labels[:4]] == methods
    assert [numbers_in(label)[0] for label in labels[:4]] == [s.sparsity for s in SERIES]
    assert [len(ax.lines) for ax in drawn(lipschitz, study).axes] == [4] * 2
    (ax,) = drawn(ratios, study).axes
    assert len(ax.lines) == 3  # 1 and two sparse series
    assert len(drawn(metaparameters, study).axes) == 8
    other = Analysis(dataclasses.replace(study.record, name="other"))
    assert len(drawn(optimizers, study, other).axes) == 2 * len(SERIES)
    _, files = publish(study, tmp_path)
    assert (tmp_path / "table.csv").read_text().startswith("batch_size,sparsity,method,k_star,")
    assert all(path.stat().st_size for path in files)


def test_claims_are_judged_for_each_series(study):
    assert judged("linear-scaling", study).measured.count("method=") == 4
    said = judged("steps-of-sparse", study).measured
    snip, synflow = said.split("; ")
    assert snip.endswith(" at S=0.9 method=snip") and synflow.endswith(" at S=0.9 method=synflow")
    (rises,) = (
        row for row in judge_claims([study], {"fake": "make"}) if row.claim.id == "lipschitz-rises"
    )
    assert rises.measured.startswith("S=0.9 method=snip: ")
    assert protocol_rows(study.record)[2] == {
        "": METHOD,
        "this study": "snip, synflow",
        "the paper": "-",
    }
    page = replication_page([Part(study, "make")], {}, Machine(2, "CPU", "2"), "make", "2020-02-02")
    assert "S=0.9 method=synflow" in page


def test_a_notebook_groups_by_it(study):
    trials = Study(study.record).trials
    assert list(trials.groupby(["method", "sparsity"]).size()) == [16] * 4
