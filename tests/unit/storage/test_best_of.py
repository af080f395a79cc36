"""A study of another's best points is on seeds of its own; one that an earlier version began stays
on those it has."""

from __future__ import annotations

import dataclasses

import pytest

from lit_dps import load
from lit_dps.analysis.analysis import Analysis
from lit_dps.core.attempt import AttemptRules
from lit_dps.core.config import StorageConfig, StudyConfig
from lit_dps.core.racing import best_trial
from lit_dps.core.trial import Cell, Status, TrialResult
from lit_dps.parallel.process import StopRequest
from lit_dps.report.warnings import seeds_of_one_sample
from lit_dps.storage import samplers
from lit_dps.storage.header import StudyChanged, declare
from lit_dps.storage.read import read_study, with_changed_samples
from lit_dps.storage.samplers import make_sampler
from lit_dps.storage.trial_queue import TrialQueue
from lit_dps.study.setup import StudySetup
from lit_dps.study.workers import work
from tests.support.fake_study import result, write_study
from tests.unit.core.test_repeats import GOAL
from tests.unit.storage.test_merge import merged
from tests.unit.storage.test_store import SPACE
from tests.unit.study.test_grid import setup

CELL = Cell(4)
SEARCH = StudyConfig(name="s", batch_sizes=[4], sparsities=[0.0], trials=2, space=SPACE, seed=5)
WINNERS = dataclasses.replace(SEARCH, name="w", best_of="s")


class Engine:
    """Trains nothing: the second point is the best."""

    def train(self, next_run, raise_if_stopped):
        while (run := next_run()) is not None:
            steps = 16 * (1 + (run.trial.point != 1))
            yield TrialResult(
                run.trial, Status.COMPLETE, steps, {"step": [steps], "val_error": [0.1]}
            )


@pytest.fixture
def run(monkeypatch):
    """Runs a study, of which the second point is the best, in a folder; returns its storage."""
    monkeypatch.setattr(StudySetup, "engine", lambda *_: Engine())

    def run(folder, study: StudyConfig) -> str:
        storage = StorageConfig(folder=str(folder))
        folder.mkdir(exist_ok=True)
        _, uid = declare(storage.optuna_url, study, "w", GOAL, {"a": 1}, {})
        list(
            work(
                dataclasses.replace(setup({}), study=study, storage=storage, uid=uid), StopRequest()
            )
        )
        return storage.optuna_url

    return run


def test_winners_take_the_sample_of_k_star_under_another_statistic(tmp_path, run):
    search = dataclasses.replace(SEARCH, trials=4, statistic="median_of_best_3")
    url = run(tmp_path, search)
    run(tmp_path, WINNERS)
    record = read_study(url, "s")
    best = best_trial(record.results[CELL], record.statistic)
    assert best.steps == record.k_star(CELL) == 32  # the least is 16
    assert [trial.params for trial in trials_in(url, "w")] == [best.trial.params] * 2


def test_the_best_points_are_read_before_the_storage_is_locked(tmp_path, run, monkeypatch):
    url = run(tmp_path, SEARCH)
    sampler = make_sampler(WINNERS, GOAL)
    declare(url, WINNERS, "w", GOAL, {"a": 1}, {})
    queue = TrialQueue(url, "w", [CELL], 1, sampler, 0, AttemptRules(GOAL))

    def refuse(*_):
        raise AssertionError("read under the lock")

    monkeypatch.setattr(samplers, "read_study", refuse)
    attempt = queue.claim_next()
    assert attempt is not None
    assert attempt.trial.params == trials_in(url, "s")[1].params


def test_winners_of_a_dense_cell_that_shows_the_trials_of_an_equal_one(tmp_path, run):
    def of_methods(study: StudyConfig, *methods: str) -> StudyConfig:
        return dataclasses.replace(study, grid={"pruning.method": list(methods)})

    url = run(tmp_path, of_methods(SEARCH, "random", "snip"))
    run(tmp_path, of_methods(WINNERS, "snip"))
    (trained,) = read_study(url, "s").trained_cells
    cell = Cell(4, 0.0, (("pruning.method", "snip"),))
    assert cell != trained
    best = read_study(url, "s").results[trained][1].trial
    assert [each.trial.params for each in read_study(url, "w").results[cell]] == [best.params] * 2


def trials_in(url: str, name: str) -> list:
    return [result.trial for result in read_study(url, name).results[CELL]]


def test_winners_are_on_seeds_of_their_own(tmp_path, run):
    url = run(tmp_path, SEARCH)
    for study in (WINNERS, dataclasses.replace(WINNERS, trials=4)):  # also those of a later command
        run(tmp_path, study)
    found, search = trials_in(url, "w"), trials_in(url, "s")
    assert [trial.point for trial in found] == [0, 1, 2, 3]
    assert all(trial.params == search[1].params for trial in found)
    seeds = [{trial.seed_for(what) for trial in found} for what in ("init", "order", "prune")]
    of_search = {trial.seed_for(what) for trial in search for what in ("init", "order", "prune")}
    assert all(len(each) == 4 and not each & of_search for each in seeds)
    assert read_study(url, "w").seed == 5 and {trial.seed for trial in search} == {5}


def test_winners_of_an_earlier_version_stay_on_the_seeds_that_they_have(tmp_path, run):
    was, now = (run(tmp_path / name, SEARCH) for name in ("was", "now"))
    declare(
        was, dataclasses.replace(WINNERS, best_of=None), "w", GOAL, {"a": 1}, {}
    )  # as it wrote the header
    for name in ("was", "now"):
        run(tmp_path / name, WINNERS)
    assert (
        {trial.seed for trial in trials_in(was, "w")}
        == {5}
        != {trial.seed for trial in trials_in(now, "w")}
    )
    records = [
        dataclasses.replace(read_study(url, "w"), config={"study": {"best_of": "s"}})
        for url in (was, now)
    ]
    for record in records:
        (values,) = seeds_of_one_sample(Analysis(record))
        assert values["best_of"] == "s"
    for one, other in ((was, now), (now, was)):
        with pytest.raises(StudyChanged) as caught:
            merged(one, other, only="w")
        assert caught.value.keys == ("trial_seed",)
    copy = f"sqlite:///{tmp_path}/copy.db"
    merged(copy, now, only="w")
    assert trials_in(copy, "w") == trials_in(now, "w")


@pytest.mark.parametrize(
    ("rates", "changed"),
    [
        ({4: [0.1], 8: [0.1]}, ""),
        ({4: [0.1, 0.2], 8: [0.1]}, "1 of 2"),
        ({4: [0.2], 8: [0.1]}, "1 of 2"),  # another rate with the same K*
        ({4: [0.1, 0.2], 8: [0.1, 0.3]}, "2 of 2"),
        ({4: [0.1]}, ""),
        ({}, ""),
    ],
)
def test_a_report_says_that_the_best_samples_of_the_other_study_have_changed(
    tmp_path, rates, changed
):
    """A study took the rate 0.1. Each trial of the other study is better than the trial before.

    The other study may lack a cell, or be deleted. It may also take samples of the first study.
    """
    url = f"sqlite:///{tmp_path}/study.db"
    taken = {}
    for cell in (Cell(4), Cell(8)):
        taken[cell] = [result(cell, 0, 32, params={"model.learning_rate": 0.1})]
    others = {}
    for batch_size, samples in rates.items():
        cell = Cell(batch_size)
        others[cell] = []
        for point, rate in enumerate(samples):
            params = {"model.learning_rate": rate}
            others[cell].append(result(cell, point, 32 - 16 * point, params=params))
    write_study(url, taken, "w", config={"study": {"best_of": "s"}})
    if others:
        write_study(url, others, "s", config={"study": {"best_of": "w"}})
    notes = load("w", url).notes
    about = [note for note in notes if "samples of study s" in note]
    expected = []
    if changed:
        expected.append(
            f"The best samples of study s have changed in {changed} cells: choose another "
            "study.name to train the present ones."
        )
    assert about == expected


def test_only_a_report_reads_the_other_study(tmp_path):
    """Reading all trials of the other study can take seconds."""
    url = f"sqlite:///{tmp_path}/study.db"
    rates = {"w": 0.1, "s": 0.2}
    for name, rate in rates.items():
        results = {CELL: [result(CELL, 0, 32, params={"model.learning_rate": rate})]}
        write_study(url, results, name, config={"study": {"best_of": "s"}})
    record = read_study(url, "w")
    assert record.changed_samples == frozenset()
    assert with_changed_samples(record, url).changed_samples == {CELL}


def test_a_name_of_the_other_study_that_is_no_text_gives_no_note(tmp_path):
    url = f"sqlite:///{tmp_path}/study.db"
    results = {CELL: [result(CELL, 0, 32, params={"model.learning_rate": 0.1})]}
    write_study(url, results, "w", config={"study": {"best_of": ["s"]}})
    assert with_changed_samples(read_study(url, "w"), url).changed_samples == frozenset()
