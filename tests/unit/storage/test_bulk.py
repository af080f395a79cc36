"""Reading the trials of many Optuna studies at once gives what Optuna gives for each; few writes."""

from __future__ import annotations

import sqlite3

import optuna
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import TrialState, create_trial
from sqlalchemy import event

from lit_dps.core.trial import Cell, Status, TrialResult
from lit_dps.storage.bulk import read_trials
from lit_dps.storage.database import open_storage
from lit_dps.storage.schema import STATUS_ATTR, cell_study_name
from tests.support.errors import raises_about
from tests.unit.storage.test_store import store

BOXES = {
    "rate": FloatDistribution(1e-3, 1.0, log=True),
    "width": IntDistribution(1, 9),
    "rule": CategoricalDistribution(["sgd", "adam", None, True]),
}
PARAMS = [
    {"rate": 0.5, "width": 3, "rule": "adam"},
    {"rule": None, "rate": 0.1},
    {"rule": True},
    {},
]
STATES = [TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL, TrialState.WAITING]


def test_all_trials_of_the_studies_that_are_asked_for(tmp_path):
    storage = open_storage(f"sqlite:///{tmp_path}/study.db")
    ids = []
    for name, count in (("one", 4), ("two", 2), ("none", 0), ("other", 3)):
        study = optuna.create_study(study_name=name, storage=storage)
        ids.append(study._study_id)
        for params, state in list(zip(PARAMS, STATES, strict=True))[:count]:
            value = 7.0 if state is TrialState.COMPLETE else None
            boxes = {key: BOXES[key] for key in params}
            attrs = {"point": len(params), "result": {"curve": [1, 0.5, "nan"], "of": name}}
            study.add_trial(
                create_trial(
                    state=state, value=value, params=params, distributions=boxes, user_attrs=attrs
                )
            )
    found = read_trials(storage, [ids[1], ids[0], ids[2]])
    assert set(found) == {*ids[:3]}
    for study_id, trials in found.items():
        expected = storage.get_all_trials(study_id)
        assert [trial.number for trial in trials] == [trial.number for trial in expected]
        for trial, other in zip(trials, expected, strict=True):
            assert list(trial.params.items()) == list(other.params.items())
            assert (trial.state, trial.user_attrs) == (other.state, other.user_attrs)
    assert read_trials(storage, []) == {}
    storage.engine.dispose()


def test_an_attribute_that_is_not_json_is_named_with_its_trial(tmp_path):
    storage = open_storage(f"sqlite:///{tmp_path}/study.db")
    study = optuna.create_study(storage=storage)
    study.add_trial(create_trial(value=1.0))
    study.add_trial(create_trial(value=1.0, user_attrs={"result": 1}))
    with sqlite3.connect(tmp_path / "study.db") as connection:
        connection.execute("update trial_user_attributes set value_json = '{'")
    with raises_about(ValueError, "'result'", 1):
        read_trials(storage, [study._study_id])


def test_a_claim_and_a_result_take_few_transactions(tmp_path):
    queue = store(f"sqlite:///{tmp_path}/study.db", points=20, cells=[Cell(4, 0.0)])
    engine = queue.storage.engine
    writes: list[str] = []
    transactions = []

    @event.listens_for(engine, "before_cursor_execute")
    def note_write(connection, cursor, statement, *others):
        if statement.startswith(("INSERT", "UPDATE", "DELETE")):
            writes.append(statement)

    @event.listens_for(engine, "commit")
    def note_commit(connection):
        if writes:
            transactions.append(list(writes))
        writes.clear()

    first = queue.claim_next()
    assert first is not None and first.trial is not None
    enqueued = [each for each in transactions if any("INTO trials " in line for line in each)]
    assert len(enqueued) == 1, "all points of a rung"
    transactions.clear()
    second = queue.claim_next()
    assert second is not None
    # The trial with its attributes, and each of its two parameters.
    assert len(transactions) == 3
    transactions.clear()
    steps = list(range(16, 16 * 31, 16))
    curve = {"step": steps, "val_error": [0.5] * 29 + [0.1], "train_loss": [1.0] * 30}
    queue.store_result(TrialResult(first.trial, Status.COMPLETE, 480, curve))
    assert len(transactions) == 2, "the result, and the state"
    (stored,) = optuna.load_study(
        study_name=cell_study_name("s", Cell(4, 0.0)), storage=queue.url
    ).get_trials(states=[TrialState.COMPLETE])
    assert stored.value == 480
    assert stored.intermediate_values == dict(zip(steps, curve["val_error"], strict=True))
    assert stored.user_attrs[STATUS_ATTR] == "complete"
    queue.leave()
