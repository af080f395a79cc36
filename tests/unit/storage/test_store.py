"""The Optuna side of a study: points declared, claimed, told, given up and taken up again."""

from __future__ import annotations

import multiprocessing
import os
import time

import optuna
import pytest
import sqlalchemy.exc
from optuna.trial import TrialState

import lit_dps.storage.trial_queue as store_module
from lit_dps.core.attempt import AttemptRules
from lit_dps.core.config import StudyConfig
from lit_dps.core.goal import Goal
from lit_dps.core.search_space import Range
from lit_dps.core.trial import FINAL_STATUSES, Cell, Status, Trial, TrialResult
from lit_dps.storage import trial_queue
from lit_dps.storage.database import open_storage
from lit_dps.storage.header import StudyChanged, check_unchanged, compare, declare, remedy_of
from lit_dps.storage.samplers import SobolSampler, sobol_point
from lit_dps.storage.schema import OWNER, RESULT_ATTR, cell_study_name, encode_result
from lit_dps.storage.trial_queue import TrialQueue
from tests.support.runs import trials_of

GOAL = Goal(0.1)
SPACE = {
    "model.learning_rate": Range(1e-3, 1.0, "log"),
    "model.momentum": Range(0.5, 0.99, "reverse_log"),
}
DEAD = "0123456789abcdef@elsewhere:1"  # the owner of a process that has no file beside the storage
CELLS = [Cell(4, 0.0), Cell(8, 0.0), Cell(4, 0.9)]


@pytest.fixture
def url(tmp_path):
    return f"sqlite:///{tmp_path}/study.db"


def store(url: str, points: int = 3, cells=CELLS, slack: float | None = None) -> TrialQueue:
    return TrialQueue(
        url, "s", cells, points, SobolSampler(SPACE, 5), 5, AttemptRules(GOAL), race_factor=slack
    )


def ended(trial: Trial, status: Status = Status.COMPLETE) -> TrialResult:
    curve = {"step": [16], "val_error": [0.1], "train_loss": [1.0]}
    return TrialResult(trial, status, 16 if status is Status.COMPLETE else None, curve)


def cell_trials(url: str, cell: Cell):
    return optuna.load_study(study_name=cell_study_name("s", cell), storage=url).trials


def test_every_cell_gets_the_same_points_in_order(url):
    s, asked = store(url), []
    for trial in trials_of(s):
        asked.append((trial.cell, trial.point))
        assert trial.params == sobol_point(SPACE, 5, trial.point)
        assert trial.seed == 5
        s.store_result(ended(trial))
    assert asked == [(cell, point) for cell in CELLS for point in range(3)]
    assert list(trials_of(store(url))) == [], "a finished study asks nothing"


def test_of_a_cell_that_is_done_the_steps_alone_are_kept(url):
    s, asked = store(url, slack=1), []
    for trial in trials_of(s):
        assert set(s._optuna_studies) == {trial.cell}, (
            "Optuna's objects hold the curves of every trial"
        )
        asked.append((trial.cell, trial.point))
        s.store_result(ended(trial, Status.COMPLETE if trial.point == 2 else Status.INFEASIBLE))
    assert asked == [(CELLS[0], p) for p in (0, 1, 2)] + [
        (cell, p) for cell in CELLS[1:] for p in (2, 0, 1)
    ]


def test_the_last_limit_holds_while_the_storage_cannot_be_read(url, monkeypatch):
    monkeypatch.setattr(trial_queue, "POLL_SECONDS", -1.0)
    s = store(url, slack=1)
    trial = next(trials_of(s))

    def fail(*args):
        raise sqlalchemy.exc.OperationalError("select", {}, OSError("connection lost"))

    with monkeypatch.context() as outage:
        outage.setattr(trial_queue, "costs_by_point", fail)
        assert s.cell_race_limit(CELLS[0]) == float("inf")
    s.store_result(ended(trial))
    assert s.cell_race_limit(CELLS[0]) == 16
    with monkeypatch.context() as outage:
        outage.setattr(trial_queue, "costs_by_point", fail)
        assert s.cell_race_limit(CELLS[0]) == 16


def test_a_trial_of_an_earlier_cell_can_still_be_told(url):
    s = store(url, points=2, slack=1)
    asked = trials_of(s)
    trials = [
        next(asked) for _ in range(3)
    ]  # an engine that trains many at a time runs ahead into the next cell
    assert [t.cell for t in trials] == [CELLS[0], CELLS[0], CELLS[1]]
    assert s.cell_race_limit(CELLS[0]) == float("inf")
    for trial in trials:
        s.store_result(ended(trial))
    assert s.cell_race_limit(CELLS[0]) == 16
    assert [s.store_result(ended(trial)).attempt for trial in asked] == [1, 0, 1], (
        "each cell counts its own"
    )
    assert [t.value for t in cell_trials(url, CELLS[0])] == [16, 16]


def test_states_and_values_in_optuna(url):
    s = store(url, points=6, cells=CELLS[:1], slack=1)
    for trial, status in zip(trials_of(s), FINAL_STATUSES, strict=True):
        s.store_result(ended(trial, status))
    states = [
        (t.state.name, t.values, t.user_attrs["result"]["status"])
        for t in cell_trials(url, CELLS[0])
    ]
    assert states == [
        ("COMPLETE", [16], "complete"),
        ("PRUNED", None, "incomplete"),
        ("FAIL", None, "infeasible"),
        ("PRUNED", None, "outraced"),
        ("FAIL", None, "stopped"),
        ("FAIL", None, "failed"),
    ]


def test_an_abandoned_point_is_asked_again_with_the_same_parameters(url):
    s = store(url)
    first = next(trials_of(s))
    s.release_claims()
    again = {trial.point: trial for trial, _ in zip(trials_of(store(url)), range(3), strict=False)}
    assert again[first.point].params == first.params
    assert [t.state.name for t in cell_trials(url, CELLS[0])][0] == "FAIL"


def test_a_result_that_was_stored_before_the_end_is_kept(url):
    """Killed between writing the result and ending the trial: the result counts and the point is
    not run again."""
    s = store(url, points=1, cells=CELLS[:1])
    trial = next(trials_of(s))
    s._claims[trial.cell, trial.point, 0].set_user_attr(RESULT_ATTR, encode_result(ended(trial)))
    s.release_claims()
    assert [(t.state.name, t.values) for t in cell_trials(url, CELLS[0])] == [("COMPLETE", [16.0])]
    assert list(trials_of(store(url, points=1, cells=CELLS[:1]))) == []


def test_few_points_wait_at_a_time_and_none_is_missed(url, monkeypatch):
    monkeypatch.setattr(store_module, "MAX_QUEUED", 3)
    one, other = store(url, points=8, cells=CELLS[:1]), store(url, points=8, cells=CELLS[:1])
    streams, taken = [trials_of(one), trials_of(other)], []
    for i in range(8):
        taken.append(next(streams[i % 2]).point)
        waiting = one._optuna_studies[CELLS[0]].get_trials(
            deepcopy=False, states=(TrialState.WAITING,)
        )
        assert len(waiting) <= 3
    assert sorted(taken) == list(range(8))
    assert [next(stream, None) for stream in streams] == [None, None]


@pytest.mark.parametrize("who", [None, "dead"])
def test_a_dead_process_loses_its_trial_and_a_living_one_keeps_it(url, who):
    s = store(url, points=2, cells=CELLS[:1])
    asked = trials_of(s)
    kept, lost = next(asked), next(asked)
    if who is None:  # cut short between asking and writing its name
        storage = open_storage(url)
        trial = storage.get_all_trials(
            storage.get_study_id_from_name(cell_study_name("s", CELLS[0]))
        )[1]
        from sqlalchemy import text

        with storage.engine.begin() as connection:
            query = text("delete from trial_user_attributes where trial_id = :id and key = :key")
            connection.execute(query, {"id": trial._trial_id, "key": OWNER})
    else:
        s._claims[lost.cell, lost.point, 0].set_user_attr(OWNER, DEAD)
    taken = list(
        trial.point
        for trial, _ in zip(
            trials_of(store(url, points=2, cells=CELLS[:1])), range(1), strict=False
        )
    )
    assert taken == [lost.point]
    assert kept.point != lost.point


def test_more_points_extend_a_cell_and_fewer_take_nothing_away(url):
    for points, expected in [(2, [0, 1]), (4, [2, 3]), (1, [])]:
        s, asked = store(url, points=points, cells=CELLS[:1]), []
        for trial in trials_of(s):
            asked.append(trial.point)
            s.store_result(ended(trial))
        assert asked == expected


def _claim_all(url, barrier, results):
    s = store(url, points=20, cells=CELLS[:1])
    barrier.wait()
    for trial in trials_of(s):
        results.put((os.getpid(), trial.point))
        time.sleep(0.2)  # a trial takes longer than waiting for a lock
        s.store_result(ended(trial))
    results.put(None)


def test_processes_neither_double_nor_lose_a_point_on_an_empty_database(url):
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(3), context.Queue()
    processes = [context.Process(target=_claim_all, args=(url, barrier, results)) for _ in range(3)]
    for process in processes:
        process.start()
    claimed, left = [], len(processes)
    while left:
        message = results.get(timeout=120)
        left -= message is None
        claimed += [message] if message else []
    for process in processes:
        process.join(30)
    assert sorted(point for _, point in claimed) == list(range(20))
    assert len({pid for pid, _ in claimed}) > 1, "one process did all the work: nothing was tested"


def _declare(url, identity, **kw):
    config = StudyConfig(
        name="s", space=SPACE, **{"batch_sizes": [4], "sparsities": [0.0], "trials": 2} | kw
    )
    declare(url, config, "workload", Goal(0.1), identity, {"config": 1})
    return optuna.load_study(study_name="s", storage=url).user_attrs


def test_a_header_is_extended_never_changed_or_shrunk(url):
    identity = {"goal": {"error": 0.1}, "data_digest": "a"}
    check_unchanged(url, "s", identity)
    assert _declare(url, identity)["batch_sizes"] == [4]
    grown = _declare(url, identity, batch_sizes=[2, 8], sparsities=[0.9], trials=5)
    assert (grown["batch_sizes"], grown["sparsities"], grown["trials"]) == (
        [2, 4, 8],
        [0.0, 0.9],
        5,
    )
    assert _declare(url, identity)["trials"] == 5

    for function in (lambda i: check_unchanged(url, "s", i), lambda i: _declare(url, i, trials=9)):
        with pytest.raises(StudyChanged) as caught:
            function({"goal": {"error": 0.2}, "data_digest": "a"})
        assert caught.value.keys == ("goal.error",)
    assert optuna.load_study(study_name="s", storage=url).user_attrs["trials"] == 5


def test_compare_names_added_and_removed_keys():
    assert compare({"a": {"b": 1, "c": 2}}, {"a": {"b": 1}, "d": None}) == [
        ("a.c", 2, "(absent)"),
        ("d", "(absent)", None),
    ]


def test_the_remedy_for_a_former_digest_is_another_name():
    former, present = "lit_dps_objects.model_01234567", "lit_dps_objects.model"
    [changed_code] = compare({"model": {"class_path": former}}, {"model": {"class_path": present}})
    [changed_class] = compare({"model": {"class_path": "a.B"}}, {"model": {"class_path": present}})
    assert "model.class_path" in remedy_of([changed_class, changed_code])
    assert "model.class_path" not in remedy_of([changed_class])
