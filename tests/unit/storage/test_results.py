"""Reading a study back from its storage, and what it amounts to cell by cell."""

import json
import math
import sqlite3

import numpy as np
import optuna
import pytest

from lit_dps.analysis.summary import summarize
from lit_dps.core.errors import StorageError
from lit_dps.core.search_space import Range
from lit_dps.core.trial import Cell, Status, Trial, TrialResult
from lit_dps.storage.columns import decode_columns
from lit_dps.storage.read import list_studies, read_study
from lit_dps.storage.schema import (
    FORMAT,
    POINT_ATTR,
    REPEAT_ATTR,
    cell_study_name,
    decode_result,
    encode_result,
)
from lit_dps.storage.stored_format import OtherFormat
from tests.support.errors import refuses
from tests.support.fake_study import GOAL, SPACE, _add, law_study, result, write_study

A, B = Cell(16, 0.0), Cell(32, 0.9)


@pytest.fixture
def storage():
    return optuna.storages.InMemoryStorage()


def params(u, v=0.5):
    return {key: box.at(x) for (key, box), x in zip(SPACE.items(), (u, v), strict=True)}


def test_a_result_survives_storage_with_values_that_json_lacks():
    curve = {
        "step": [16, 32, 48],
        "val_error": [0.9, 0.5, math.nan],
        "train_loss": [2.25, math.inf, -math.inf],
    }
    trial = Trial(A, 3, params(0.3), seed=7)
    ours = TrialResult(trial, Status.INFEASIBLE, None, curve, {"conv1.weight": (15, 150)}, 1.5)
    stored = encode_result(ours)
    assert stored["curve"]["train_loss"] == [2.25, "inf", "-inf"]
    back = decode_result(json.loads(json.dumps(stored, allow_nan=False)), trial)
    assert math.isnan(back.curve["val_error"].pop())
    ours.curve["val_error"].pop()
    assert back == ours
    assert all(type(step) is int for step in back.curve["step"])


def test_numpy_numbers_become_plain_ones():
    curve = {
        "step": list(np.arange(16, 48, 16)),
        "val_error": list(np.array([0.5, np.nan], np.float32)),
    }
    stored = encode_result(
        TrialResult(Trial(A, 0), Status.COMPLETE, np.int64(32), curve, {"w": np.array([1, 2])})
    )
    assert json.loads(json.dumps(stored)) == stored
    assert (stored["steps"], stored["kept"]) == (32, {"w": [1, 2]})
    assert decode_columns(stored["curve"])["step"] == [16, 32]
    assert stored["curve"]["val_error"] == [0.5, "nan"]


def test_a_study_comes_back_whole(storage):
    done = [
        result(A, 1, 320, params=params(0.2)),
        result(A, 0, None),
        result(A, 2, None, "infeasible"),
    ]
    write_study(
        storage, {A: done, B: []}, "mine", trials=4, seed=11, config={"model": {"width": 3}}
    )
    record = read_study(storage, "mine")
    assert (record.name, record.workload, record.trials, record.seed) == ("mine", "digits", 4, 11)
    assert (record.goal, record.space, record.config) == (GOAL, SPACE, {"model": {"width": 3}})
    assert (record.batch_sizes, record.sparsities) == ((16, 32), (0.0, 0.9))
    # The grid is every batch size at every sparsity, by sparsity first; cells that nothing ran in
    # are empty.
    assert record.cells == list(record.results) == [A, Cell(32, 0.0), Cell(16, 0.9), B]
    assert [len(results) for results in record.results.values()] == [3, 0, 0, 0]
    assert [r.trial.point for r in record.results[A]] == [0, 1, 2]
    best = record.results[A][1]
    assert best.trial == Trial(A, 1, params(0.2), 11)
    assert (best.status, best.steps) == (Status.COMPLETE, 320)


def test_integer_metaparameters_come_back_as_integers(storage):
    space = {"model.width": Range(1, 9, integer=True)}
    write_study(storage, {A: [result(A, 0, 16, params={"model.width": 4})]}, space=space)
    record = read_study(storage, "fake")
    assert record.space == space
    assert type(record.results[A][0].trial.params["model.width"]) is int


def test_interrupted_attempts_do_not_count_and_of_two_finished_the_first_does(storage):
    twice = [result(A, 0, 640), result(A, 1, 480), result(A, 0, 320)]
    write_study(storage, {A: twice}, trials=4, interrupted={A: [0, 2]}, running={A: 1})
    record = read_study(storage, "fake")
    assert [(r.trial.point, r.steps) for r in record.results[A]] == [(0, 640), (1, 480)]
    (summary,) = summarize(record)
    assert (summary.counts, summary.pending, summary.running) == ({"complete": 2}, 2, 1)


SHORT = {"step": [16], "val_error": [0.5], "train_loss": [1.0]}


def test_a_trial_that_runs_again_is_running(storage):
    """It has a result, but is not finished."""
    paused = [result(A, point, None, "outraced", curve=SHORT) for point in (0, 1)]
    write_study(storage, {A: [*paused, result(A, 2, 640)]}, trials=4, race_factor=2)
    study = optuna.load_study(study_name=cell_study_name("fake", A), storage=storage)
    for attrs in ({"point": 0, "repeat": 0}, {"point": 3, "repeat": 0}):
        running = optuna.trial.create_trial(state=optuna.trial.TrialState.RUNNING, user_attrs=attrs)
        study.add_trial(running)
    (summary,) = summarize(read_study(storage, "fake"))
    assert (summary.pending, summary.running) == (3, 2)


def test_a_state_without_result_or_a_result_without_state_is_not_finished(storage):
    write_study(storage, {A: [result(A, 0, 640)]}, trials=3)
    study = optuna.load_study(study_name=cell_study_name("fake", A), storage=storage)
    running = optuna.trial.create_trial(
        state=optuna.trial.TrialState.RUNNING,
        user_attrs={"point": 1, "repeat": 0, "result": encode_result(result(A, 1, 16))},
    )
    study.add_trial(running)
    again = optuna.trial.create_trial(
        state=optuna.trial.TrialState.WAITING, user_attrs={"point": 0, "repeat": 0}
    )
    study.add_trial(again)  # queued although point 0 has finished: nobody waits for it
    record = read_study(storage, "fake")
    assert [r.trial.point for r in record.results[A]] == [0]
    assert record.running == {A: 1}


def test_lists_headers_only(storage):
    write_study(storage, {A: [result(A, 0, 16)]}, "zoo")
    write_study(storage, {A: []}, "ant")
    optuna.create_study(study_name="not ours", storage=storage)
    assert list_studies(storage) == ["ant", "zoo"]


def test_a_missing_study_names_those_there_are(storage):
    write_study(storage, {A: [result(A, 0, 16)]}, "zoo")
    for name in ("zo", cell_study_name("zoo", A)):
        with refuses("study.name", name, error=StorageError) as refused:
            read_study(storage, name)
        assert str(refused.value).endswith(": zoo")
    with refuses("study.name", "zoo", error=StorageError):
        read_study(optuna.storages.InMemoryStorage(), "zoo")


@pytest.mark.parametrize("stored", [FORMAT - 1, FORMAT + 1])
def test_another_format_is_refused(storage, stored):
    write_study(storage, {A: []}, lit_dps_format=stored)
    with pytest.raises(OtherFormat) as error:
        read_study(storage, "fake")
    assert (error.value.name, error.value.stored_format) == ("fake", stored)
    assert (" migrate --storage" in str(error.value)) is (stored < FORMAT)


@pytest.mark.parametrize(
    ("header", "named"),
    [
        ({"space": {"model.momentum": {"lo": 1}}}, "'lo'"),
        ({"goal": {"value": 2.0, "check_interval": 16, "max_steps": 16}}, "goal.error"),
        ({"sparsities": None}, "'sparsities'"),
    ],
)
def test_a_damaged_header_is_one_line(storage, header, named):
    write_study(storage, {A: []})
    study = optuna.load_study(study_name="fake", storage=storage)
    for key, value in header.items():
        study.set_user_attr(key, value)
    with refuses("study.name", "fake", error=StorageError) as error:
        read_study(storage, "fake")
    assert named in str(error.value) and "\n" not in str(error.value)


def test_a_damaged_result_is_one_line(storage):
    write_study(storage, {A: [result(A, 0, 16)]})
    study = optuna.load_study(study_name=cell_study_name("fake", A), storage=storage)
    study.add_trial(
        optuna.trial.create_trial(
            value=1.0,
            user_attrs={
                "point": 1,
                "repeat": 0,
                "environment": None,
                "result": {"status": "complete"},
            },
        )
    )
    with refuses("study.name", "fake", error=StorageError) as error:
        read_study(storage, "fake")
    message = str(error.value)
    assert f" 1 of {A}" in message and "'steps'" in message and "\n" not in message


def test_sqlite_gives_what_memory_gives(storage, tmp_path):
    url = f"sqlite:///{tmp_path}/study.db"
    for place in (storage, optuna.storages.RDBStorage(url)):
        law_study(place, batch_sizes=(4, 256), trials=3)
    ours, theirs = read_study(storage, "fake"), read_study(url, "fake")
    assert repr(ours) == repr(theirs)  # curves hold nan, which equals nothing
    assert list_studies(url) == ["fake"]
    before = (tmp_path / "study.db").read_bytes()
    read_study(url, "fake")
    assert (tmp_path / "study.db").read_bytes() == before


def test_a_missing_database_is_not_created(tmp_path):
    path = tmp_path / "none" / "study.db"
    for read in (lambda url: read_study(url, "fake"), list_studies):
        with refuses(str(path), error=StorageError):
            read(f"sqlite:///{path}")
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_optuna_database_is_said_so_and_left_alone(tmp_path):
    path = tmp_path / "other.db"
    path.write_bytes(b"not a database, but long enough to be taken for one" * 20)
    url = f"sqlite:///{path}"
    with refuses(url, error=StorageError) as refused:
        read_study(url, "fake")
    assert "restore" in str(refused.value)
    path.unlink()
    with sqlite3.connect(path) as other:
        other.execute("CREATE TABLE runs (name TEXT)")
    other.close()
    before = path.read_bytes()
    with refuses(url, error=StorageError) as refused:
        read_study(url, "fake")
    assert "Optuna" in str(refused.value)
    assert path.read_bytes() == before


def test_a_truncated_database_is_one_line(tmp_path):
    path = tmp_path / "study.db"
    law_study(optuna.storages.RDBStorage(f"sqlite:///{path}"), batch_sizes=(4, 8), trials=4)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with refuses(f"sqlite:///{path}", error=StorageError) as refused:
        read_study(f"sqlite:///{path}", "fake")
    assert "restore" in str(refused.value) and "\n" not in str(refused.value)


def test_a_locked_database_is_said_so(tmp_path):
    path = tmp_path / "study.db"
    opened = optuna.storages.RDBStorage(
        f"sqlite:///{path}", engine_kwargs={"connect_args": {"timeout": 0.05}}
    )
    write_study(opened, {A: []})
    writer = sqlite3.connect(path, isolation_level=None)
    writer.execute("BEGIN EXCLUSIVE")
    try:
        with refuses(f"sqlite:///{path}", "database is locked", error=StorageError):
            read_study(opened, "fake")
    finally:
        writer.close()


def test_summaries_count_and_choose(storage):
    high, low = params(0.99, 0.5), params(0.5, 0.01)
    cells = {
        A: [
            result(A, 0, None),
            result(A, 1, 320, params=high),
            result(A, 2, 160, params=params(0.5)),
            result(A, 3, 160, params=high),
            result(A, 4, None, "infeasible"),
        ],
        B: [result(B, 0, 16, params=low)],
    }
    write_study(storage, cells, trials=6)
    first, *empty, last = summarize(read_study(storage, "fake"))
    assert [c.cell for c in (first, *empty, last)] == [A, Cell(32, 0.0), Cell(16, 0.9), B]
    # Of two equally fast trials the lower point gave K*; it is inside its ranges, the other is not.
    assert (first.k_star, first.best.trial.point, first.boundary) == (160, 2, {})
    assert (first.counts, first.pending) == ({"complete": 3, "incomplete": 1, "infeasible": 1}, 1)
    assert (last.k_star, last.boundary) == (16, {"model.momentum": "low"})
    for cell in empty:
        assert (cell.k_star, cell.best, cell.boundary) == (None, None, {})
        assert (cell.counts, cell.pending) == ({}, 6)


def test_points_beyond_the_declared_trials_count_but_are_not_missed(storage):
    write_study(storage, {A: [result(A, 0, 640), result(A, 5, 320)]}, trials=2)
    (summary,) = summarize(read_study(storage, "fake"))
    assert (summary.k_star, summary.counts, summary.pending) == (320, {"complete": 2}, 1)


@pytest.mark.parametrize(("state", "is_shown"), [("WAITING", True), ("RUNNING", False)])
def test_a_failed_trial_is_hidden_only_while_it_runs_again(storage, state, is_shown):
    failed = TrialResult(Trial(A, 0, params(0.1), 0), Status.FAILED, None, {})
    write_study(storage, {A: [failed]})
    study = optuna.load_study(study_name=cell_study_name("fake", A), storage=storage)
    _add(study, state, {POINT_ATTR: 0, REPEAT_ATTR: 0}, {}, SPACE)
    record = read_study(storage, "fake")
    statuses = [result.status for result in record.results[A]]
    assert statuses == [Status.FAILED] * is_shown
    (stored,) = read_study(storage, "fake", truncates=False).results[A]
    assert stored.status is Status.FAILED
