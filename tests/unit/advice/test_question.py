"""Which batch sizes advice answers for, and how long a training takes."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace

import pandas as pd
import pytest

from lit_dps.advice.announced_cost import print_cost
from lit_dps.advice.options import Clock, Options
from lit_dps.advice.pilot_plan import PilotPlan
from lit_dps.advice.question import Question
from lit_dps.advice.run import _step_times
from lit_dps.advice.step_probe import FULL, SPENT, StepTimes
from lit_dps.advice.step_time import Timed
from lit_dps.parallel.process import StopRequest
from lit_dps.storage.advice_store import AdviceStore
from lit_dps.study.preflight.parts_check import NORM
from tests.unit.advice.test_step_probe import setup

PLAN = PilotPlan(4, "model.lr", 0.01, 0.5, is_adaptive=True)
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


@pytest.mark.parametrize(
    ("goal_values", "sizes"),
    [
        ({}, [2, 4, 8]),
        ({"max_examples": 8}, [2, 4]),
        # The second validation at B = 8 is beyond 15 examples, and within 16.
        ({"max_examples": 15}, [2, 4]),
        ({"max_examples": 16}, [2, 4, 8]),
        # Validations after steps 2 and 4: the first one at B = 8 has 16 examples.
        ({"max_examples": 15, "check_interval": 2}, [2, 4]),
        ({"max_examples": 17, "check_interval": 2}, [2, 4, 8]),
        ({"max_seconds": 0.01}, [2, 4, 8]),
        # At B = 8, two validations are within 16 examples. The mean needs three.
        ({"max_examples": 16, "rule": "mean_of_checks", "options": {"checks": 3}}, [2, 4]),
    ],
)
def test_a_batch_whose_run_would_end_before_the_goal_has_no_answer(goal_values, sizes):
    """goal.max_steps is 4. Your batch size is 4, which always has an answer."""
    steps = {1: 7.0, 2: 4.0, 4: 9.0, 8: 1.75}
    law = SimpleNamespace(
        predict=lambda sizes: pd.DataFrame(
            {"batch_size": sizes, "steps": [steps[b] for b in sizes]}
        )
    )
    question = question_of(FULL)
    goal = dataclasses.replace(question.setup.goal, **goal_values)
    question = dataclasses.replace(question, setup=dataclasses.replace(question.setup, goal=goal))
    assert question.batch_sizes == [1, 2, 4, 8]
    assert question.sizes_within_budget(law) == sizes


def test_two_ranks_without_a_timed_step_count_as_one_device_for_the_budget_of_seconds():
    question = dataclasses.replace(question_of(FULL, ranks=2), plan=PLAN)
    goal = dataclasses.replace(question.setup.goal, max_seconds=0.02)
    question = dataclasses.replace(question, setup=dataclasses.replace(question.setup, goal=goal))
    assert question.step_time.at(4, 2) is None
    # Two steps of 14 ms at B = 4.
    assert question.most_steps == 2


@pytest.mark.parametrize("plan", [None, PLAN])
def test_the_announced_training_ends_at_the_budget_of_examples(capsys, plan):
    """goal.max_steps is 4, and 8 examples are 2 steps."""
    store = SimpleNamespace(read=dict)
    question = dataclasses.replace(question_of(FULL), plan=plan, store=store)
    goal = dataclasses.replace(question.setup.goal, max_examples=8)
    question = dataclasses.replace(question, setup=dataclasses.replace(question.setup, goal=goal))
    print_cost(question, Clock(math.inf, SimpleNamespace(keep=lambda **values: None), 0.0))
    text = " ".join(capsys.readouterr().err.split())
    expected = "one training of 2 steps at B = 4" if plan is None else "takes all of its 2 steps"
    assert expected in text


@pytest.mark.parametrize("plan", [None, PLAN])
def test_a_few_timed_steps_announce_the_training_up_to_the_budget_of_examples(
    tmp_path, capsys, plan
):
    """goal.max_steps is 4, and 8 examples are 2 steps."""
    user = setup()
    user = dataclasses.replace(user, goal=dataclasses.replace(user.goal, max_examples=8))
    store = AdviceStore(f"sqlite:///{tmp_path}/study.db", "s")
    session = SimpleNamespace(
        probe_study=SimpleNamespace(setup=user, plan=plan),
        stored={},
        store=store,
        stop=StopRequest(),
        clock=Clock(5.0, store, 0.0),
    )
    _step_times(session)
    text = " ".join(capsys.readouterr().err.split())
    expected = "one training of 2 steps at B = 4" if plan is None else "Its 2 steps take at most"
    assert expected in text
