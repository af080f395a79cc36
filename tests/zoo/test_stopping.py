"""What ends a run other than its goal and its budget."""

from __future__ import annotations

import pytest

from tests.support.texts import in_one_line
from tests.zoo.run import spec
from tests.zoo.verify import assert_as_audited, assert_refused, assert_works

NEVER = {"monitor": "val_loss", "error": 1e-6}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("min_steps", 5),
        ("min_epochs", 2),
        ("max_time", "00:01:00:00"),
        ("limit_train_batches", 0.5),
        ("limit_train_batches", 3),
        ("overfit_batches", 2),
        ("limit_val_batches", 2),
        ("fast_dev_run", True),
    ],
)
def test_what_a_trainer_may_not_be_told(zoo, key, value):
    assert_refused(zoo(trainer={key: value}), rf"trainer\.{key}")


@pytest.mark.parametrize("way", ["module", pytest.param("callback", marks=pytest.mark.long)])
def test_a_run_that_is_stopped_from_within(zoo, way):
    callbacks = (
        [{"class_path": "tests.zoo.animals.callbacks.Impatient"}] if way == "callback" else []
    )
    model = "steps.StopsItself" if way == "module" else "models.Net"
    outcome = zoo(model, trainer={"callbacks": callbacks} if callbacks else {}, goal=NEVER)
    assert_works(outcome, ["stopped"])
    for result in outcome.results:
        assert result.curve["step"] == [5] and result.failure
        assert len(outcome.audit(result).rates) == 7
    assert "stopped" in outcome.out


def test_one_trial_that_fails(zoo):
    outcome = zoo("steps.Fails", goal=NEVER)
    assert outcome.code == 1, outcome.err
    failed, others = [], []
    for result in outcome.results:
        (failed if result.status == "failed" else others).append(result)
    assert [(r.trial.cell.batch_size, r.trial.cell.sparsity) for r in failed] == [(8, 0.8)]
    assert failed[0].failure == "ValueError: no more of this"
    assert "no more of this" in failed[0].traceback and "steps.py" in failed[0].traceback
    assert failed[0].steps is None
    assert len(others) == 3
    for result in others:
        assert result.status == "incomplete"
        assert_as_audited(outcome, result)
    assert "no more of this" in in_one_line(outcome.err + outcome.out)


def test_a_study_of_nothing_but_failures_ends_after_three(zoo):
    outcome = zoo(spec("steps.Fails", always=True), goal=NEVER, trials=2)
    assert outcome.code == 1, outcome.err
    assert [result.status for result in outcome.results] == ["failed"] * 3
    assert {result.failure for result in outcome.results} == {"ValueError: no more of this"}
