"""The JSON document of a study has the numbers of its tables, and is strict JSON."""

from __future__ import annotations

import dataclasses
import json
import math

import optuna
import pytest

import lit_dps
from lit_dps.core.attempt import Attempt
from lit_dps.core.goal import Goal
from lit_dps.core.trial import Cell, Status
from lit_dps.report.document import CellEntry, Document, LawEntry, run_document, to_json
from lit_dps.report.notebook import Study
from lit_dps.storage.read import read_study
from tests.support.fake_study import analysis_of, law_results, law_study, result

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
    attempt.record(4, 0.3, True, 1.0, True)
    missed = run_document(attempt, CellEntry(batch_size=8), None, None).to_dict()
    assert missed["status"] == "no result" and missed["last_value"] == 0.3
    assert missed["cells"][0]["bound"] == "at least"
    assert missed["cells"][0]["steps"]["value"] == 4
    attempt.record(8, 0.05, True, 1.0, True)
    met = run_document(attempt, CellEntry(batch_size=8), None, "a.ckpt").to_dict()
    assert met["status"] == "answered" and met["checkpoint"] == "a.ckpt"
    assert met["cells"][0]["steps"]["value"] == 8 and met["cells"][0]["examples"] == 64
    document = study.to_dict()
    assert met["cells"][0].keys() == document["cells"][0].keys()
    common = {each.name for each in dataclasses.fields(Document)} - {"further"}
    assert common <= met.keys() & document.keys()


def test_k_star_is_within_its_limits():
    cells = {}
    for batch_size in (4, 16, 64, 256):
        cell = Cell(batch_size, 0.0)
        cells[cell] = law_results(cell, 16, 4e4, 60)
    entry = Study(analysis_of(cells).record).to_dict()["cells"][0]
    low, high = entry["k_star"]["low"], entry["k_star"]["high"]
    assert low <= entry["k_star"]["value"] <= high
