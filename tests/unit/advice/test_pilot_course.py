"""What the course of the pilot's runs decides from what is stored, without training."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from lit_dps.advice.options import MIN_ANSWER_SECONDS, Clock, Options
from lit_dps.advice.pilot_course import (
    MAX_TRAININGS,
    MAX_TRAININGS_FULL,
    _Course,
    ask_by_pilot,
    max_trainings,
)
from lit_dps.advice.pilot_evidence import PilotRun
from lit_dps.advice.pilot_plan import MET, MISSED, Outcome, PilotPlan
from lit_dps.advice.question import Question
from lit_dps.advice.step_probe import SPENT, StepTimes
from lit_dps.advice.step_time import Timed
from lit_dps.parallel.process import StopRequest
from tests.unit.advice.test_question import FakeProbes
from tests.unit.advice.test_step_probe import setup

PLAN = PilotPlan(4, "model.lr", 0.1, 1.0, is_adaptive=False)


class FakeStore:
    """Values in memory."""

    def __init__(self, **values):
        self.values = values

    def read(self):
        return dict(self.values)

    def keep(self, **values):
        self.values.update(values)


def question_with(store: FakeStore, slope: float) -> Question:
    timed = [Timed(m, 0.01 + slope * m) for m in (1, 4, 16, 64)]
    times = StepTimes(timed, check=0.05, largest=64, reason=SPENT)
    user = setup()
    return Question(user, Options(), store, FakeProbes(user), None, times, 10, plan=PLAN)


@pytest.mark.parametrize(("slope", "trainings"), [(1e-5, MAX_TRAININGS), (1.0, MAX_TRAININGS_FULL)])
def test_a_device_that_is_full_at_the_users_batch_size_may_take_more(slope, trainings):
    assert max_trainings(question_with(FakeStore(), slope), 4) == trainings


def pilot_fields(**values) -> dict:
    fields = {"steps": 40, "steps_run": 40, "seconds": 1.0, "status": "complete", "noise": None}
    return fields | values


def pilot(**values) -> dict:
    return PilotRun(**pilot_fields(**values)).to_dict()


def clock() -> Clock:
    return Clock(math.inf, SimpleNamespace(keep=lambda **values: None), 0.0)


def test_a_pilot_that_missed_its_goal_is_a_lower_bound_and_nothing_else_runs(capsys):
    store = FakeStore(pilot=pilot(steps=None, status="incomplete", best=0.07))
    question = question_with(store, 1e-5)
    ask_by_pilot(question, PLAN, clock(), StopRequest())
    assert store.values["bounds"] == [[4, 40.0]] and question.probes.tried == []
    assert "0.07" in capsys.readouterr().err


def test_a_goal_that_is_met_at_the_first_validation_tells_no_steps(capsys):
    interval = setup().goal_of_trials.check_interval
    store = FakeStore(pilot=pilot(steps=interval, steps_run=interval))
    question = question_with(store, 1e-5)
    ask_by_pilot(question, PLAN, clock(), StopRequest())
    assert question.probes.tried == [] and "goal.check_interval" in capsys.readouterr().err


def test_validations_are_as_long_as_along_the_pilot():
    assert question_with(FakeStore(), 1e-5).check_seconds == 0.05
    store = FakeStore(pilot=pilot(check_seconds=0.002))
    assert question_with(store, 1e-5).check_seconds == 0.002


@pytest.mark.parametrize(("seconds_left", "can_end"), [(0.9, False), (1.1, True)])
def test_a_further_rate_begins_only_if_the_race_ends_it_in_time(seconds_left, can_end):
    """The best rate so far took 100 steps, 10 ms each."""
    course = _Course(question_with(FakeStore(), 1e-12), PLAN, clock(), StopRequest())
    vars(course.question)["check_seconds"] = 0.0
    course.clock.budget = seconds_left + MIN_ANSWER_SECONDS
    tried = {1.0: Outcome(MET, 100), 0.5: Outcome(MISSED, 0.3)}
    run = PilotRun(**pilot_fields(steps=10**4, steps_run=10**4))
    assert course._can_end(16, tried, 400, run) == can_end


def test_the_announced_time_has_what_is_not_training(capsys):
    question = question_with(FakeStore(), 1e-12)
    question.times.waited = 0.5
    # 4 s of the answer and 1 s of each run, beside another program.
    assert question.other_seconds(6) == pytest.approx(20.0)
    course = _Course(question, PLAN, clock(), StopRequest())
    vars(question)["check_seconds"] = 0.0
    course.announce_rest(PilotRun(**pilot_fields()))
    # Two pilots of 40 steps, 10 ms each, and the rest.
    assert course.clock.announced == pytest.approx(0.8 + 20.0, abs=0.1)
    assert "at most about 21 s in all" in capsys.readouterr().err
