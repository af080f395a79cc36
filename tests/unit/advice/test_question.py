"""Which batch sizes advice answers for, and how long a training takes."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pandas as pd
import pytest

from lit_dps.advice.options import Clock, Options
from lit_dps.advice.question import Question
from lit_dps.advice.run import _step_times
from lit_dps.advice.step_probe import FULL, SPENT, StepTimes
from lit_dps.advice.step_time import Timed
from lit_dps.parallel.process import StopRequest
from lit_dps.storage.advice_store import AdviceStore
from lit_dps.study.preflight.parts_check import NORM
from tests.unit.advice.test_step_probe import setup

TIMED = [Timed(m, 0.01 + 1e-3 * m) for m in (1, 2, 4, 8)]


class FakeProbes:
    """Probes that have no result."""

    def __init__(self, setup):
        self.setup, self.tried, self.without_room = setup, [], set()

    def record(self):
        return None

    def all_runs(self):
        return None

    def run(self, batch_size, end, stop, clock):
        self.tried.append(batch_size)
        return True


def question_of(reason: str, devices: tuple[int, ...] = (1,), ranks: int = 1) -> Question:
    user = setup(devices=ranks)
    times = StepTimes(TIMED, check=0.05, largest=8, reason=reason, is_memory_full=reason == FULL)
    options = Options(60, devices=devices)
    return Question(user, options, None, FakeProbes(user), None, times, 10)


def test_a_step_has_the_share_of_a_validation_at_its_batch_size():
    """The batches of the validation are as large as those of the training."""
    times = StepTimes(TIMED, check=0.05, largest=8, reason=FULL, is_memory_full=True)
    times.check_by_batch = 0.4
    question = dataclasses.replace(question_of(FULL), times=times)
    interval = question.setup.built_goal.check_interval
    for batch_size, check in ((1, 0.45), (4, 0.15), (8, 0.1), (64, 0.1)):
        step = question.step_time.at(batch_size).value
        seconds = question.step_seconds(batch_size, 1)
        assert seconds - step == pytest.approx(check / interval), batch_size


@pytest.mark.parametrize("device", ["here", "another machine"])
def test_steps_are_timed_again_on_another_device(tmp_path, capsys, monkeypatch, device):
    monkeypatch.setattr("lit_dps.advice.run.hardware", lambda: "here")
    store = AdviceStore(f"sqlite:///{tmp_path}/study.db", "s")
    stored = StepTimes(TIMED, check=0.05, largest=8, reason=SPENT)
    pilot = {"check_seconds": 30.0}
    store.keep(**stored.to_stored(), timed_on=f"{device}, CPU, devices: 1", pilot=pilot)
    session = SimpleNamespace(
        probe_study=SimpleNamespace(setup=setup(), plan=None),
        stored=store.read(),
        store=store,
        stop=StopRequest(),
        clock=Clock(5.0, store, 0.0),
    )
    times = _step_times(session)
    assert (times.timed == TIMED) is (device == "here")
    assert store.read()["timed_on"] == "here, CPU, devices: 1"
    is_same = store.read()["pilot"]["check_seconds"] == 30.0
    assert is_same is (device == "here"), "a validation takes another time there"
    assert ("another machine, CPU" in capsys.readouterr().err) is (device != "here")


@pytest.mark.parametrize(
    ("reason", "devices", "sizes"),
    [
        (FULL, (1, 4), [1, 2, 4, 8, 16, 32]),
        (SPENT, (1, 2), [1, 2, 4, 8, 16]),
        ("is it above the split?", (1, 4), [1, 2, 4, 8]),  # four devices have no more examples
    ],
)
def test_it_answers_for_what_the_devices_have_room_for(reason, devices, sizes):
    assert question_of(reason, devices).batch_sizes == sizes


def test_the_largest_batch_is_on_the_devices_that_are_here():
    """Four devices would take 32 examples; one, which is here, was timed up to 8."""
    assert question_of(FULL, (1, 4)).largest == 8
    assert question_of(FULL, (1, 4), ranks=2).largest == 16


def test_a_batch_that_does_not_fit_and_cannot_be_accumulated_has_a_step_time_of_its_user():
    small = [Timed(m, 0.01 + 1e-3 * m) for m in (1, 2)]
    times = StepTimes(small, check=0.05, largest=2, reason=FULL, is_memory_full=True)
    question = dataclasses.replace(question_of(FULL), times=times, depends_on_batch=(NORM,))
    # B = 4 in two parts of 2.
    assert question.step_time.at(4) is None
    assert question.seconds_on_one_device(4) == pytest.approx(2 * 0.012, rel=1e-2)


@pytest.mark.parametrize(("reason", "of_64"), [(SPENT, 4 * 0.026), (FULL, 8 * 0.018)])
def test_a_step_of_a_user_who_accumulates_has_all_his_parts(reason, of_64):
    """B = 8 in 4 parts takes 4 micro-batches of 12 ms each, and not one of 18 ms."""
    asked = question_of(reason)
    trainer = {**asked.setup.workload.trainer, "accumulate_grad_batches": 4}
    workload = dataclasses.replace(asked.setup.workload, trainer=trainer)
    user = dataclasses.replace(asked.setup, workload=workload)
    question = dataclasses.replace(asked, setup=user, probes=FakeProbes(user))
    assert question.step_time.at(8).value == pytest.approx(4 * 0.012, rel=1e-2)
    assert question.step_time.at(64).value == pytest.approx(of_64, rel=1e-2)
    assert question.step_time.at(2) is None, "4 parts need 4 examples"


def test_a_training_takes_its_steps_and_checks():
    # 4 steps at B = 4, each 14 ms and a check of 50 ms
    question = question_of(FULL)
    assert question.training_seconds == pytest.approx(4 * (0.014 + 0.05), rel=1e-2)
    # 2 steps of 4 examples, or at the check after 3 steps of 14 ms.
    for limit, steps in (({"max_examples": 8}, 2), ({"max_seconds": 0.04}, 3)):
        goal = dataclasses.replace(question.setup.goal, **limit)
        setup = dataclasses.replace(question.setup, goal=goal)
        limited = dataclasses.replace(question, setup=setup)
        assert limited.most_steps == steps
        assert limited.training_seconds == pytest.approx(steps * (0.014 + 0.05), rel=1e-2)


@pytest.mark.parametrize(("max_examples", "sizes"), [(None, [2, 4, 8]), (8, [2, 4])])
def test_a_batch_whose_run_would_end_before_the_goal_has_no_answer(max_examples, sizes):
    """goal.max_steps is 4. Your batch size is 4, which always has an answer."""
    steps = {1: 7.0, 2: 4.0, 4: 9.0, 8: 1.75}
    law = SimpleNamespace(
        predict=lambda sizes: pd.DataFrame(
            {"batch_size": sizes, "steps": [steps[b] for b in sizes]}
        )
    )
    question = question_of(FULL)
    goal = dataclasses.replace(question.setup.goal, max_examples=max_examples)
    question = dataclasses.replace(question, setup=dataclasses.replace(question.setup, goal=goal))
    assert question.batch_sizes == [1, 2, 4, 8]
    assert question.sizes_within_budget(law) == sizes
