"""The JSON document of a study has the numbers of its tables, and is strict JSON."""

from __future__ import annotations

import dataclasses
import json
import math

import optuna
import pytest

import lit_dps
from lit_dps.analysis.analysis import Analysis
from lit_dps.core.attempt import Attempt, Validation
from lit_dps.core.goal import Goal
from lit_dps.core.search_space import Range
from lit_dps.core.step_timing import CellTiming, StepTiming
from lit_dps.core.trial import Cell, Status
from lit_dps.report.document import CellEntry, Document, LawEntry, run_document, to_json
from lit_dps.report.notebook import Study
from lit_dps.storage.read import read_study
from tests.support.fake_study import analysis_of, law_results, law_study, result
from tests.unit.analysis.test_answer import study as made_up
from tests.unit.analysis.test_answer import timed

LAWS = {0.0: (4e4, 60), 0.9: (8e4, 120)}


@pytest.fixture(scope="module")
def study() -> Study:
    storage = optuna.storages.InMemoryStorage()
    law_study(storage, laws=LAWS)
    return Study(read_study(storage, "fake"))


def test_the_document_has_the_numbers_of_the_tables(study):
    document = json.loads(to_json(study.to_dict("report.html")))
    assert document["schema"] == 2 and document["lit_dps"] == lit_dps.__version__
    assert document["name"] == "fake" and document["report"] == "report.html"
    assert (document["source"], document["status"]) == ("study", "answered")
    assert document["pending"] == 0 and document["notes"] == study.notes
    rows = study.cells.to_dict("records")
    answers = study.answer.to_dict("records")
    assert len(document["cells"]) == len(rows) == 8
    for entry, row, answer in zip(document["cells"], rows, answers, strict=True):
        assert entry["batch_size"] == row["batch_size"]
        assert entry["sparsity"] == row["sparsity"]
        assert entry["k_star"]["value"] == row["k_star"]
        assert entry["bound"] == ("at most" if row["floor"] else "exact")
        assert entry["trial"] == row["point"]
        assert entry["trials"]["complete"] == row["complete"]
        names = study.analysis.record.short_names
        values = {names[key]: value for key, value in entry["metaparameters"].items()}
        assert values == {name: row[name] for name in names.values()}
        assert entry["steps"]["value"] == answer["steps"]
        assert entry["examples"] == answer["examples"]
        assert entry["steps_known"] == ("measured" if answer["why_not_law"] else "law")


def test_the_document_has_the_law_of_each_series(study):
    laws = study.to_dict()["laws"]
    assert [law["sparsity"] for law in laws] == list(LAWS)
    for law, row in zip(laws, study.law.to_dict("records"), strict=True):
        for name in ("c1", "c2"):
            assert law[name]["value"] == row[name]
            assert law[name]["low"] == row[f"{name}_low"]
            assert law[name]["high"] == row[f"{name}_high"]
        if row["identifiable"]:
            assert law["critical_batch_size"]["value"] == row["b_crit"]
            assert law["refused"] == "nothing" and law["reason"] == ""
        else:
            assert law["critical_batch_size"] is None
            assert law["refused"] != "nothing" and law["reason"]
        assert law["batch_sizes"] == [4, 16, 64, 256]


def test_the_recommendation_is_the_cell_with_the_least_time(study):
    document = study.to_dict()
    times = [cell["seconds"]["value"] for cell in document["cells"]]
    assert document["recommendation"]["seconds"]["value"] == min(times)
    assert "fastest" in document["recommendation"]["marks"]


def test_a_study_without_k_star_has_a_status_and_no_law():
    cell = Cell(16, 0.0)
    missed = [dataclasses.replace(result(cell, 0, None), status=Status.INCOMPLETE)]
    ended = Study(analysis_of({cell: missed}, trials=1).record).to_dict()
    assert ended["status"] == "no result" and ended["recommendation"] is None
    assert ended["cells"][0]["k_star"] is None and ended["cells"][0]["bound"] is None
    assert ended["laws"][0]["refused"] == "prediction" and ended["laws"][0]["reason"]
    unfinished = Study(analysis_of({cell: missed}, trials=3).record).to_dict()
    assert unfinished["status"] == "unfinished" and unfinished["pending"] == 2
    assert unfinished["cells"][0]["marks"] == ["pending"]


def test_a_study_whose_trials_failed_has_no_result():
    cell = Cell(16, 0.0)
    failed = [result(cell, 0, None, "failed")]
    document = Study(analysis_of({cell: failed}, trials=1).record).to_dict()
    assert (document["status"], document["pending"]) == ("no result", 0)


def timed_study(validate_every: int | None) -> Study:
    """Return a study with a slow validation, whose steps were timed after it."""
    results = {}
    timings = []
    for batch_size in (4, 64):
        cell = Cell(batch_size, 0.0)
        results[cell] = [result(cell, 0, 2 * (68 - batch_size))]
        timings.append(CellTiming(cell, (0.001 * batch_size,) * 3, 1.0))
    timing = StepTiming("Xeon, 2 cores", "2026-11-29", 1, 1, tuple(timings))
    record = dataclasses.replace(analysis_of(results).record, step_timing=timing)
    return Study(record, Analysis(record, validate_every=validate_every))


def test_step_times_have_their_source_and_machine(study):
    document = timed_study(None).to_dict()
    assert [cell["timing"] for cell in document["cells"]] == ["after the study"] * 2
    assert document["step_timing"] == {
        "machine": "Xeon, 2 cores",
        "date": "2026-11-29",
        "threads": 1,
        "ranks": 1,
    }
    of_trials = study.to_dict()
    assert {cell["timing"] for cell in of_trials["cells"]} == {"trials with checks"}
    assert of_trials["step_timing"] is None


def test_the_recommendation_counts_validations_that_the_user_asks_for():
    # 128 steps of 4 ms, or 8 steps of 64 ms; validations take 1 s.
    without = timed_study(None).to_dict()
    assert [cell["validation_seconds"] for cell in without["cells"]] == [None, None]
    assert [cell["seconds"]["value"] for cell in without["cells"]] == pytest.approx([0.512, 0.512])
    assert [cell["total_seconds"] for cell in without["cells"]] == [
        cell["seconds"] for cell in without["cells"]
    ]
    document = timed_study(8).to_dict()
    assert [cell["validation_seconds"] for cell in document["cells"]] == [16, 1]
    totals = [cell["total_seconds"]["value"] for cell in document["cells"]]
    assert totals == pytest.approx([16.512, 1.512])
    assert document["recommendation"]["batch_size"] == 64
    rare = timed_study(200).to_dict()
    assert [cell["validation_seconds"] for cell in rare["cells"]] == [1, 1]


def test_totals_have_the_limits_of_the_table_and_are_missing_where_it_has_none():
    """B = 16 of an earlier version has no time of a validation, B = 32 has the least total."""
    found = timed(made_up())
    results = {**found.results, Cell(16): made_up().results[Cell(16)]}
    record = dataclasses.replace(found, results=results)
    study = Study(record, Analysis(record, validate_every=10))
    document = study.to_dict()
    names = ("total_seconds", "total_low", "total_high")
    for entry, row in zip(document["cells"], study.answer.to_dict("records"), strict=True):
        if entry["batch_size"] == 16:
            assert entry["total_seconds"] is None and entry["seconds"] is not None
            continue
        assert list(entry["total_seconds"].values()) == pytest.approx([row[name] for name in names])
        assert entry["total_seconds"]["low"] < entry["total_seconds"]["value"]
    assert document["recommendation"]["batch_size"] == 32


@pytest.mark.parametrize(("low", "marks"), [(0.0, []), (0.1, ["range_edge"])])
def test_an_end_that_cannot_be_moved_is_no_mark(low, marks):
    space = {"optim.momentum": Range(low, 0.9)}
    cell = Cell(16, 0.0)
    trials = [result(cell, 0, 32, params={"optim.momentum": low})]
    entry = Study(analysis_of({cell: trials}, space=space).record).to_dict()["cells"][0]
    assert entry["range_edges"] == {"optim.momentum": "low"}
    assert [mark for mark in entry["marks"] if mark == "range_edge"] == marks


def test_shared_cells_count_their_pending_trials_once():
    cells = {Cell(16, 0.0): [result(Cell(16, 0.0), 0, 32)], Cell(16, 0.5): []}
    record = analysis_of(cells, trials=3).record
    assert Study(record).to_dict()["pending"] == 2 + 3
    shared = {Cell(16, 0.5): Cell(16, 0.0)}
    assert Study(dataclasses.replace(record, shared=shared)).to_dict()["pending"] == 2


def test_a_number_that_is_not_finite_is_null_and_has_its_place():
    laws = [LawEntry(c1={"value": 1.0, "low": -math.inf, "high": math.inf})]
    document = Document(
        source="study",
        status="answered",
        name="x",
        goal=None,
        laws=laws,
        cells=[{"batch_size": 8, "examples": math.nan}],
    )
    written = json.loads(to_json(document.to_dict()))
    assert written["laws"][0]["c1"] == {"value": 1.0, "low": None, "high": None}
    assert written["cells"][0]["examples"] is None
    assert written["not_finite"] == {
        "laws[0].c1.low": "-Infinity",
        "laws[0].c1.high": "Infinity",
        "cells[0].examples": "NaN",
    }


def test_a_run_of_fit_has_the_keys_of_a_study(study):
    attempt = Attempt(None, Goal(0.1, check_interval=4, max_steps=8))
    attempt.record(Validation(4, 0.3, True, 1.0, True))

    def eights(steps: int) -> int:
        return 8 * steps

    missed = run_document(attempt, CellEntry(batch_size=8), None, None, eights).to_dict()
    assert missed["status"] == "no result" and missed["last_value"] == 0.3
    assert missed["cells"][0]["bound"] == "at least"
    assert missed["cells"][0]["steps"]["value"] == 4
    attempt.record(Validation(8, 0.05, True, 1.0, True))
    met = run_document(attempt, CellEntry(batch_size=8), None, "a.ckpt", eights).to_dict()
    assert met["status"] == "answered" and met["checkpoint"] == "a.ckpt"
    assert met["cells"][0]["steps"]["value"] == 8 and met["cells"][0]["examples"] == 64
    assert (met["cells"][0]["bound"], met["cells"][0]["marks"]) == ("exact", [])
    document = study.to_dict()
    assert met["cells"][0].keys() == document["cells"][0].keys()
    common = {each.name for each in dataclasses.fields(Document)} - {"further"}
    assert common <= met.keys() & document.keys()


def test_a_last_value_that_is_a_bound_is_null_and_named_in_a_note():
    attempt = Attempt(None, Goal(0.1, check_interval=8, max_steps=16))
    attempt.enable_early_validations()
    found = []
    for step, is_exact in ((8, True), (16, False)):
        attempt.record(Validation(step, 0.1001, is_exact, 1.0))
        document = run_document(attempt, CellEntry(batch_size=8), None, None, lambda steps: 8)
        found.append((document.to_dict()["last_value"], len(document.notes)))
    assert found == [(0.1001, 0), (None, 1)]
    assert "at least 0.1001" in document.notes[0]


def test_a_goal_at_the_first_check_is_an_upper_bound_and_unknown_examples_are_null():
    attempt = Attempt(None, Goal(0.1, check_interval=4, max_steps=8))
    attempt.record(Validation(4, 0.05, True, 1.0, True))
    document = run_document(attempt, CellEntry(batch_size=8), None, None, lambda steps: None)
    (cell,) = document.to_dict()["cells"]
    assert (cell["steps"]["value"], cell["bound"], cell["marks"]) == (4, "at most", ["upper_bound"])
    assert cell["examples"] is None and len(document.notes) == 1


def test_k_star_is_within_its_limits():
    cells = {}
    for batch_size in (4, 16, 64, 256):
        cell = Cell(batch_size, 0.0)
        cells[cell] = law_results(cell, 16, 4e4, 60)
    entry = Study(analysis_of(cells).record).to_dict()["cells"][0]
    low, high = entry["k_star"]["low"], entry["k_star"]["high"]
    assert low <= entry["k_star"]["value"] <= high
