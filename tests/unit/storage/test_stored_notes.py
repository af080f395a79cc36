"""Notes of dry runs accumulate in a study, and merges keep those of both storages."""

from __future__ import annotations

import pytest

from lit_dps.core.idle_axes import notes_on_idle_axes
from lit_dps.core.trial import Cell
from lit_dps.report.warnings import study_notes
from lit_dps.storage.merge import merge
from lit_dps.storage.read import open_elsewhere, read_study
from lit_dps.storage.run_records import store_notes
from tests.support.fake_study import analysis_of, law_results, write_study

IDLE = {"model.lr2 changes nothing: equal at 0.01 and 0.1": "UNUSABLE"}
WIDER = {"model.lr2 changes nothing: equal at 1e-3 and 0.5": "UNUSABLE"}
OTHER_KEY = {"model.lr1 changes nothing: equal at 0.01 and 0.1": "UNUSABLE"}
RANDOM = {"val_error of one network is 0.5 and then 0.25": "WEAK"}
RESULTS = {Cell(4): law_results(Cell(4), 2, 4e4, 60)}


@pytest.fixture
def url(tmp_path):
    url = f"sqlite:///{tmp_path}/here.db"
    write_study(url, RESULTS)
    return url


def test_a_study_of_an_earlier_version_has_no_notes(url):
    assert read_study(url, "fake").notes == {}


def test_a_note_stays_until_a_note_that_differs_in_numbers_replaces_it(url):
    for notes in (IDLE | RANDOM, OTHER_KEY, {}):
        store_notes(url, "fake", notes, has_trials=True)
    assert read_study(url, "fake").notes == IDLE | RANDOM | OTHER_KEY
    store_notes(url, "fake", WIDER, has_trials=True)
    assert read_study(url, "fake").notes == WIDER | RANDOM | OTHER_KEY


@pytest.mark.parametrize(
    "places", [("B = 16", "B = 64"), ("model.width = 16", "model.width = 32"), ("k=-1", "k=-0.5")]
)
def test_notes_on_several_values_are_kept(url, places):
    notes = {f"at {place} the rate is 0 for 3 steps": "WEAK" for place in places}
    for text, level in notes.items():
        store_notes(url, "fake", {text: level}, has_trials=True)
    assert read_study(url, "fake").notes == notes


def test_before_the_first_result_a_dry_run_replaces_the_notes_of_the_last_one(url):
    store_notes(url, "fake", IDLE, has_trials=False)
    store_notes(url, "fake", RANDOM, has_trials=False)
    assert read_study(url, "fake").notes == RANDOM
    store_notes(url, "fake", {}, has_trials=False)
    assert read_study(url, "fake").notes == {}


@pytest.mark.parametrize("is_new", [True, False])
def test_a_merge_keeps_the_notes_of_both(url, tmp_path, is_new):
    store_notes(url, "fake", RANDOM, has_trials=True)
    target = f"sqlite:///{tmp_path}/target.db"
    if not is_new:
        write_study(target, RESULTS)
        store_notes(target, "fake", IDLE, has_trials=True)
    with open_elsewhere(url, target) as other:
        merge(target, [other])
    assert read_study(target, "fake").notes == (RANDOM if is_new else IDLE | RANDOM)


def test_the_report_names_idle_axes_that_no_dry_run_noted():
    cells = {}
    for steps in (1, 4):
        cell = Cell(4, 0.0, (("local.steps", steps),))
        cells[cell] = law_results(cell, 2, 4e4, 60)
    switched_on = {"local": {"workers": 2}}
    for config, count in (({}, 1), ({"local": None}, 1), (switched_on, 0)):
        study = analysis_of(cells, axes={"local.steps": [1, 4]}, config=config)
        noted = [line for line in study_notes(study) if line.startswith("local.steps has no")]
        assert len(noted) == count
    for model in (None, {"class_path": None}):
        (text,) = notes_on_idle_axes({"model": model}, {"local.steps": [1, 4]}, {})
        assert "local.steps" in text
    # A dry run of the same study has stored the note.
    (text,) = notes_on_idle_axes({}, {"local.steps": [1, 4]}, {})
    study = analysis_of(cells, axes={"local.steps": [1, 4]}, notes={text: "WEAK"})
    assert [line for line in study_notes(study) if text in line] == [f"Dry run: {text}."]


def test_the_report_has_each_note_once_the_most_harmful_first():
    lines = study_notes(analysis_of(RESULTS, notes=RANDOM | IDLE))
    notes = [line for line in lines if line.startswith("Dry run: ")]
    assert notes == [f"Dry run: {text}." for text in IDLE | RANDOM]
