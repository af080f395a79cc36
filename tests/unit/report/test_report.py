"""The report of a study: what the table says, to the letter, and the rows behind it."""

import csv
import dataclasses
import re
import subprocess
import sys

import optuna
import pytest

from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.tables import frame, records, value_text, write_csv
from lit_dps.core.atomic_write import replacing
from lit_dps.core.goal import Goal
from lit_dps.core.search_space import Range
from lit_dps.core.trial import Cell, Series
from lit_dps.report.no_result import COUNT_HEADS
from lit_dps.report.repeats import repeats_section
from lit_dps.report.text import render
from lit_dps.report.warnings import no_k_star, study_notes
from lit_dps.storage.read import read_study
from tests.support.errors import raises_about
from tests.support.fake_study import analysis_of, law_study, result, write_study
from tests.support.texts import numbers_in

SPACE = {
    "model.learning_rate": Range(1e-3, 10.0, "log"),
    "model.momentum": Range(0.5, 0.9999, "reverse_log"),
    "model.width": Range(1, 64, "log", integer=True),
}


def study(**kw):
    """Dense: 3 batch sizes with one complete trial of two each. Sparse: one such batch size, and
    trials to come."""

    def params(rate, momentum, width):
        return dict(zip(SPACE, (rate, momentum, width), strict=True))

    dense, sparse = ([Cell(b, s) for b in (8, 64, 2048)] for s in (0.0, 0.9))
    cells = {
        dense[0]: [
            result(dense[0], 0, 13040, params=params(0.0123456, 0.9, 4)),
            result(dense[0], 1, None),
        ],
        dense[1]: [
            result(dense[1], 0, None, "infeasible"),
            result(dense[1], 1, 1664, params=params(0.5, 0.999, 16)),
        ],
        dense[2]: [
            result(dense[2], 0, 144, params=params(9.9, 0.99985, 64)),
            result(dense[2], 1, None),
        ],
        sparse[0]: [],
        sparse[1]: [
            result(sparse[1], 0, 3200, params=params(0.25, 0.98765, 8)),
            result(sparse[1], 1, None),
        ],
        sparse[2]: [result(sparse[2], 0, None)],
    }
    storage = optuna.storages.InMemoryStorage()
    write_study(storage, cells, "demo", trials=2, space=SPACE, **kw)
    return read_study(storage, "demo")


def test_the_text_to_the_letter(golden):
    analysis = Analysis(study(running={Cell(2048, 0.9): 1}))
    text = render(analysis)
    golden.check("report/demo.txt", text)
    law = analysis.laws[Series(0.0)]
    assert law.line() in text
    for batch_size, k_star in law.k_star.items():
        assert law.fit.steps(batch_size) == pytest.approx(k_star, rel=0.03)


def test_equal_records_give_equal_text():
    assert render(Analysis(study())) == render(Analysis(study()))


def test_without_pending_trials_there_is_no_such_column():
    storage = optuna.storages.InMemoryStorage()
    law_study(storage, trials=3)
    text = render(Analysis(read_study(storage, "fake")))
    assert COUNT_HEADS["pending"] not in text


def test_outraced_trials_are_counted_where_there_are_any():
    cell = Cell(8, 0.0)
    storage = optuna.storages.InMemoryStorage()
    write_study(storage, {cell: [result(cell, 0, 160), result(cell, 1, 480)]}, race_factor=2.0)
    head, row = render(Analysis(read_study(storage, "fake"))).splitlines()[2:4]
    counted = ["complete", "incomplete", "infeasible", "outraced"]
    assert re.split("  +", head.strip())[3:7] == [COUNT_HEADS[status] for status in counted]
    assert row.split()[:7] == ["8", "0", "160", "1", "0", "0", "1"]
    assert COUNT_HEADS["outraced"] not in render(Analysis(study()))


def test_an_empty_study_says_so():
    storage = optuna.storages.InMemoryStorage()
    write_study(storage, {Cell(8, 0.0): [], Cell(16, 0.0): []}, trials=5)
    record = read_study(storage, "fake")
    analysis = Analysis(record)
    assert f"  S=0  {analysis.laws[Series(0.0)].describe()}\n" in render(analysis)
    _, pending = study_notes(Analysis(record))
    assert [*no_k_star(Analysis(record))] == [{"yet": " yet", "too_few": "No trial has"}]
    assert numbers_in(pending) == [10, 10, 0]


@pytest.mark.parametrize(
    ("value", "box", "text"),
    [
        (0.0123456, Range(1e-3, 1, "log"), "0.0123"),
        (0.5, Range(1e-3, 1, "log"), "0.500"),
        (123.4, Range(1, 1e3, "log"), "123"),
        (3.21e-7, Range(1e-9, 1, "log"), "3.21e-07"),
        (0.0, Range(0, 1), "0.00"),
        (0.9, Range(0, 0.9999, "reverse_log"), "0.900"),
        (0.0, Range(0, 0.9999, "reverse_log"), "0.00"),
        (0.999, Range(0, 0.9999, "reverse_log"), "0.99900"),
        (0.9999, Range(0, 0.9999, "reverse_log"), "0.999900"),
        (12, Range(1, 64, integer=True), "12"),
        (None, Range(0, 1), "-"),
    ],
)
def test_values_are_told_apart(value, box, text):
    assert value_text(value, box) == text


def test_csv_holds_the_values_in_full(tmp_path):
    record = study()
    write_csv(Analysis(record).table, tmp_path / "table.csv")
    with (tmp_path / "table.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == [
        *(
            "batch_size",
            "sparsity",
            "k_star",
            "floor",
            "complete",
            "incomplete",
            "infeasible",
            "outraced",
            "stopped",
        ),
        *("failed", "pending", "point", "learning_rate", "momentum", "width", "boundary"),
    ]
    assert len(rows) == 6
    assert list(rows[1].values()) == [
        "64",
        "0.0",
        "1664",
        "0",
        *"1010000",
        "1",
        "0.5",
        "0.999",
        "16",
        "",
    ]
    assert list(rows[3].values()) == ["8", "0.9", "", "0", *"0000002", "", "", "", "", ""]
    assert float(rows[0]["learning_rate"]) == 0.0123456
    ends = rows[2]["boundary"].split("; ")
    assert [end.split() for end in ends] == [
        [name, "high"] for name in ("learning_rate", "momentum", "width")
    ]


def test_an_end_beyond_which_nothing_lies_is_not_to_be_widened():
    cell, space = Cell(8), {"model.momentum": Range(0.0, 0.9, "reverse_log")}
    storage = optuna.storages.InMemoryStorage()
    write_study(
        storage,
        {cell: [result(cell, 0, 160, params={"model.momentum": 0.01})]},
        "demo",
        trials=1,
        space=space,
    )
    assert study_notes(Analysis(read_study(storage, "demo"))) == []


def test_fit_rows_hold_the_fits():
    analysis = Analysis(study())
    laws, (dense, sparse) = analysis.laws, records(analysis.law_table)
    fit = laws[Series(0.0)].fit
    assert (dense["sparsity"], dense["batch_sizes"], dense["identifiable"]) == (0.0, 3, True)
    assert (dense["c1"], dense["c2"], dense["b_crit"]) == (fit.c1, fit.c2, fit.c1 / fit.c2)
    assert (dense["c2_low"], dense["c2_high"]) == laws[Series(0.0)].c2_interval
    assert dense["verdict"] == laws[Series(0.0)].describe()
    assert sparse["verdict"] == laws[Series(0.9)].describe()
    assert {
        sparse[f"{name}{end}"] for name in ("c1", "c2", "b_crit") for end in ("", "_low", "_high")
    } == {None}


def test_an_empty_csv_has_its_header(tmp_path):
    write_csv(frame([], ["point", "status"]), tmp_path / "none.csv")
    assert (tmp_path / "none.csv").read_text() == "point,status\n"


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text("old")
    with raises_about(RuntimeError, "half way"), replacing(path) as temporary:
        temporary.write_text("ne")
        raise RuntimeError("half way")
    assert path.read_text() == "old"
    with replacing(path) as temporary:
        temporary.write_text("new")
        assert path.read_text() == "old"
        written = temporary.stat().st_ino
    assert path.read_text() == "new"
    assert path.stat().st_ino == written  # the same file under its new name, not a copy
    assert list(tmp_path.iterdir()) == [path]


def test_reports_need_no_figures_and_no_training():
    code = """
import sys
import lit_dps.analysis, lit_dps.replication, lit_dps.storage.read, lit_dps.cli.analyze
print(sorted({"matplotlib", "torch", "lightning", "mlflow"} & set(sys.modules)))
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"


def test_repeats_without_a_slack_end_at_each_budget_of_the_goal():
    cell = Cell(8)
    best = result(cell, 0, 160)
    repeat = dataclasses.replace(best, trial=dataclasses.replace(best.trial, repeat=1))
    study = analysis_of(
        {cell: [best]},
        goal=Goal(0.1, check_interval=16, max_steps=400, max_examples=2000),
        repeated={cell: [repeat]},
        repeats={"count": 1, "points": 1, "race_factor": None},
    )
    head = repeats_section(study).splitlines()[0]
    assert numbers_in(head.replace(",", "")) == [1, 400, 2000]
