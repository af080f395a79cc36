"""What the course of the pilot's runs decides from what is stored, without training."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from lit_dps.advice import pilot_course
from lit_dps.advice.announced_cost import print_cost
from lit_dps.advice.options import MIN_ANSWER_SECONDS, Clock, Options
from lit_dps.advice.pilot_course import (
    MAX_TRAININGS,
    MAX_TRAININGS_FULL,
    Course,
    ask_by_pilot,
    max_trainings,
)
from lit_dps.advice.pilot_evidence import PilotRun, results_at
from lit_dps.advice.pilot_plan import MET, MISSED, Outcome, PilotPlan, next_factor
from lit_dps.advice.question import Question
from lit_dps.advice.step_probe import SPENT, StepTimes
from lit_dps.advice.step_time import Timed
from lit_dps.core.environment import Environment, with_key
from lit_dps.core.trial import Cell, Status, Trial, TrialResult
from lit_dps.parallel.process import StopRequest
from tests.unit.advice.test_probe_study import probes_of
from tests.unit.advice.test_question import FakeProbes
from tests.unit.advice.test_step_probe import Net, setup

PLAN = PilotPlan(4, "model.lr", 0.1, 1.0, is_adaptive=False)


class FakeStore:
    """Values in memory."""

    def __init__(self, **values):
        self.values = values

    def read(self):
        return dict(self.values)

    def keep(self, **values):
        self.values.update(values)

    def append(self, key, value):
        self.values.setdefault(key, []).append(value)


class SmallRateIsWorse(Net):
    """Misses its goal; its error is 0.5 at small rates and 0.25 at others."""

    def __init__(self, lr: float = 0.1):
        super().__init__()
        self.lr = lr

    def validation_step(self, batch, batch_idx):
        self.log("val_error", 0.5 if self.lr < 0.02 else 0.25)


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


def question_of_small_rates(tmp_path, plan):
    """Return a question without time for validation, its runs and its store."""
    store = FakeStore()
    question = question_with(store, 1e-12)
    question.times.check = 0.0
    runs = probes_of(tmp_path, f"{__name__}.SmallRateIsWorse")
    return dataclasses.replace(question, plan=plan, probes=runs), runs, store


def test_two_rates_that_miss_the_step_limit_are_compared_by_their_metric(tmp_path):
    """Without a K, the record drops runs that the limit stopped. Their results count."""
    plan = PilotPlan(4, "model.lr", 0.01, 0.5, is_adaptive=True)
    question, runs, store = question_of_small_rates(tmp_path, plan)
    run = PilotRun(**pilot_fields())
    course = Course(question, plan, clock(), StopRequest(), run)
    affordable = course.remaining_seconds()
    assert course._try(8, [1.0], limit=2) and course._try(8, [1.0, 2.0], limit=2)
    assert results_at(runs.record(), 8) == []
    stopped = results_at(runs.all_runs(), 8)
    assert [result.status for result in stopped] == [Status.OUTRACED] * 2
    assert store.values["tried"] == [[8, 1.0, MISSED, 0.5], [8, 2.0, MISSED, 0.25]]
    assert next_factor(course._tried(8), plan.first_factors) == 4.0
    seconds = 4 * question.step_seconds_here(8)
    assert affordable - course.remaining_seconds() == pytest.approx(seconds)


@pytest.mark.parametrize(("can_end", "steps"), [(False, [2, 2]), (True, [4, 4, 4])])
def test_a_bound_is_not_above_the_steps_of_the_rates_that_missed(
    monkeypatch, tmp_path, capsys, can_end, steps
):
    """An earlier command ran two rates to step 2; the limit is 4 now. A third rate continues them."""
    plan = PilotPlan(4, "model.lr", 0.01, 0.5, is_adaptive=True)
    question, runs, store = question_of_small_rates(tmp_path, plan)
    law = SimpleNamespace(samples=lambda sizes: np.full((4, 1), 4.0))
    run = PilotRun(**pilot_fields())
    course = _WithLaw(question, plan, clock(), StopRequest(), run, law)
    assert course._try(8, [1.0], limit=2) and course._try(8, [1.0, 2.0], limit=2)
    assert course.step_limit(8) == 4
    monkeypatch.setattr(Course, "can_end", lambda *_: can_end)
    course.resume()
    assert [result.steps_run for result in results_at(runs.all_runs(), 8)] == steps
    assert store.values["bounds"] == [[8, float(steps[0])]]
    assert f"K > {steps[0]}:" in capsys.readouterr().err


class MeetsLate(Net):
    """Meets its goal at step 4."""

    def validation_step(self, batch, batch_idx):
        self.log("val_error", 0.5 if self.global_step < 4 else 0.0)


def test_a_rate_that_meets_the_goal_as_it_is_continued_has_a_k(tmp_path):
    plan = PilotPlan(4, "model.lr", 0.01, 0.5, is_adaptive=True)
    runs = probes_of(tmp_path, f"{__name__}.MeetsLate")
    question = dataclasses.replace(question_with(FakeStore(), 1e-12), plan=plan, probes=runs)
    course = Course(question, plan, clock(), StopRequest(), PilotRun(**pilot_fields()))
    assert course._try(8, [1.0], limit=2)
    assert course._tried(8) == {1.0: Outcome(MISSED, 0.5)}
    assert course._try(8, [1.0, 2.0], limit=4)
    assert course._tried(8) == {1.0: Outcome(MET, 4), 2.0: Outcome(MET, 4)}


def course_of(question: Question, **values) -> Course:
    run = PilotRun(**pilot_fields(**values))
    return Course(question, PLAN, clock(), StopRequest(), run)


def clock() -> Clock:
    return Clock(math.inf, SimpleNamespace(keep=lambda **values: None), 0.0)


def test_a_pilot_that_missed_its_goal_is_a_lower_bound_and_nothing_else_runs(capsys):
    store = FakeStore(pilot=pilot(steps=None, status="incomplete", best=0.07))
    question = question_with(store, 1e-5)
    ask_by_pilot(question, PLAN, clock(), StopRequest())
    assert store.values["bounds"] == [[4, 40.0]] and question.probes.tried == []
    assert "0.07" in capsys.readouterr().err


def test_a_pilot_that_diverged_is_no_bound():
    store = FakeStore(pilot=pilot(steps=None, status="infeasible"))
    ask_by_pilot(question_with(store, 1e-5), PLAN, clock(), StopRequest())
    assert "bounds" not in store.values


def test_a_goal_that_is_met_at_the_first_validation_tells_no_steps(capsys):
    interval = setup().built_goal.check_interval
    store = FakeStore(pilot=pilot(steps=interval, steps_run=interval))
    question = question_with(store, 1e-5)
    ask_by_pilot(question, PLAN, clock(), StopRequest())
    assert question.probes.tried == [] and "goal.check_interval" in capsys.readouterr().err


def test_validations_are_as_long_as_along_the_pilot():
    assert question_with(FakeStore(), 1e-5).checks.seconds == 0.05
    store = FakeStore(pilot=pilot(check_seconds=0.002))
    question = question_with(store, 1e-5)
    assert question.checks.seconds == pytest.approx(0.002)
    vars(question).pop("checks")
    question.times.check_by_batch = 0.2
    interval = question.setup.built_goal.check_interval
    # At B = 4, half of a validation is for its number of batches.
    assert question.checks.seconds_per_step(4) == pytest.approx(0.002 / interval)
    assert question.checks.seconds_per_step(8) == pytest.approx(0.0015 / interval)


@pytest.mark.parametrize(("seconds_left", "can_end"), [(0.9, False), (1.1, True)])
def test_a_further_rate_begins_only_if_the_race_ends_it_in_time(seconds_left, can_end):
    """The best rate so far took 100 steps, 10 ms each."""
    course = course_of(question_with(FakeStore(), 1e-12), steps=10**4, steps_run=10**4)
    course.question.times.check = 0.0
    course.clock.budget = seconds_left + MIN_ANSWER_SECONDS
    tried = {1.0: Outcome(MET, 100), 0.5: Outcome(MISSED, 0.3)}
    assert course.can_end(16, tried, 400) == can_end


@pytest.mark.parametrize(("slope", "limit"), [(1e-12, 40), (1e-3, 20)])
def test_the_first_run_at_a_batch_size_ends_where_the_time_of_all_runs_ends(slope, limit):
    """The pilot takes 40 steps; without its time, two more trainings may be run."""
    course = course_of(question_with(FakeStore(), slope))
    course.question.times.check = 0.0
    seconds = 80 * course.question.step_time.at(4).value
    affordable = seconds / course.question.step_time.at(64).value
    assert course.affordable_steps(64) == pytest.approx(affordable)
    assert min(math.floor(affordable), 40) == pytest.approx(limit, abs=6)
    law = SimpleNamespace(samples=lambda sizes: np.full((4, 1), 1000.0))
    course = _WithLaw(course.question, PLAN, clock(), StopRequest(), course.pilot, law)
    assert course.step_limit(64) == min(math.floor(affordable), 40)


ENVIRONMENT = with_key({"hardware": "EPYC"}, since="")


def timed_run(
    batch_size: int, point: int, step_seconds: float, steps: int = 40, timed: dict | None = None
) -> TrialResult:
    """Return a run of this environment, whose steps were timed."""
    curve = {"step": [steps], "val_error": [0.0]}
    times = {"steps": steps, "training": steps * step_seconds, "checks": 1, "checking": 0.0}
    times = {**times, "waited": 0.0, **(timed or {})}
    trial = Trial(Cell(batch_size), point, {"model.lr": 0.1})
    return TrialResult(
        trial, Status.COMPLETE, steps, curve, timed=times, environment=ENVIRONMENT["key"]
    )


def course_with(*runs: TrialResult, slowdown: float = 1.0, **fields) -> Course:
    """Return a course after some runs. By the model, a step takes 10 ms at each batch size."""
    question = question_with(FakeStore(), 1e-12)
    question.times.check = 0.0
    question.times.slowdown = slowdown
    by_cell = {}
    for run in runs:
        by_cell.setdefault(run.trial.cell, []).append(run)
    setup = dataclasses.replace(question.probes.setup, environment=Environment(ENVIRONMENT))
    question.probes.setup = setup
    question.probes.all_runs = lambda: SimpleNamespace(results=by_cell)
    return course_of(question, check_seconds=0.01, **fields)


@pytest.mark.parametrize(
    ("runs", "slowdown", "seconds"),
    [
        ([], 1.0, 0.8),
        ([timed_run(4, 0, 0.005)], 1.0, 0.4),
        # The start of the pilot took 0.02 s. Readings count up to a fifth of its training.
        ([replace(timed_run(4, 0, 0.005), seconds=0.22)], 1.0, 0.4 - 0.02),
        ([replace(timed_run(4, 0, 0.005), seconds=9.0)], 1.0, 0.4 - 0.04),
        # The runs at B = 16 count by their own time: 30 ms a step.
        ([timed_run(4, 0, 0.02), timed_run(16, 0, 0.03, 20)], 1.0, 1.6 - 0.6),
        # Steps were timed on a busy machine, where each takes twice as long. The runs waited, too.
        (
            [timed_run(4, 0, 0.01, timed={"waited": 0.2}), timed_run(16, 0, 0.01, 20)],
            2.0,
            0.8 - 0.4,
        ),
        # Only the last 10 steps of a resumed run are timed.
        ([timed_run(16, 0, 0.03, 20, {"steps": 10, "training": 0.3})], 1.0, 0.8 - 0.6),
        # Runs of another machine count by the model.
        ([replace(timed_run(16, 0, 9.0, 20), environment="other")], 1.0, 0.8 - 0.2),
        ([replace(timed_run(4, 0, 9.0), environment="other")], 1.0, 0.8),
        ([replace(timed_run(16, 0, 9.0, 20), timed={})], 1.0, 0.8 - 0.2),
    ],
)
def test_runs_count_by_their_own_time_under_the_load_of_the_timed_steps(runs, slowdown, seconds):
    """The pilot takes 40 steps. Two more trainings may be run."""
    course = course_with(*runs, slowdown=slowdown)
    assert course.remaining_seconds() == pytest.approx(seconds)


@pytest.mark.parametrize(("of_pilot", "steps"), [(0.005, 40), (0.01, 80), (0.02, 80)])
def test_a_forecast_is_no_shorter_than_the_model_and_as_slow_as_the_pilot(of_pilot, steps):
    """The seconds of two trainings, over 10 ms by the model or over the longer ones of the pilot."""
    course = course_with(timed_run(4, 0, of_pilot))
    assert course.affordable_steps(16) == pytest.approx(steps)


@pytest.mark.parametrize(("runs", "can_end"), [([], True), ([timed_run(16, 0, 0.018)], False)])
def test_a_further_rate_takes_as_long_as_the_runs_at_its_batch_size(runs, can_end):
    """Of two trainings of 40 steps of 10 ms, at most 0.08 s remain after a run at B = 16."""
    course = course_with(timed_run(4, 0, 0.01), *runs)
    assert course.can_end(16, {1.0: Outcome(MET, 40)}, 400) == can_end


def test_a_run_is_at_most_eight_times_the_batch_size_of_all_runs_so_far(monkeypatch):
    asked = []
    monkeypatch.setattr(
        pilot_course, "worth_of_runs", lambda law, candidates, *rest: asked.append(candidates) or []
    )
    question = question_with(FakeStore(), 1e-12)
    law = SimpleNamespace(
        samples=lambda sizes: np.ones((4, len(sizes))),
        predict=lambda sizes: pd.DataFrame({"batch_size": sizes, "steps": 1.0}),
        reach=(4, 4),
        range=(4, 4),
    )
    run = PilotRun(**pilot_fields())
    course = _WithLaw(question, PLAN, clock(), StopRequest(), run, law)
    assert course.choose(closed={16}) is None
    assert question.largest == 64 and asked == [[8, 32]]


@dataclass(frozen=True)
class _WithLaw(Course):
    """A course with a given law."""

    given: object = None

    def law(self, without=None):
        return self.given


@dataclass(frozen=True)
class _Scripted(_WithLaw):
    """A course whose runs need given steps, by batch size and factor; 0 if the budget ends them."""

    script: dict = dataclasses.field(default_factory=dict)
    runs: list = dataclasses.field(default_factory=list)

    def _try(self, batch_size, factors, limit):
        self.runs.append((batch_size, factors[-1]))
        steps = self.script[batch_size, factors[-1]]
        if not steps:
            return False
        self.question.store.append("tried", [batch_size, factors[-1], MET, steps])
        return True


def scripted(store: FakeStore, script: dict) -> _Scripted:
    question = question_with(store, 1e-12)
    question.times.check = 0.0
    law = SimpleNamespace(samples=lambda sizes: np.full((4, 1), 1000.0))
    run = PilotRun(**pilot_fields(steps=100, steps_run=100))
    return _Scripted(question, PLAN, clock(), StopRequest(), run, law, script)


def test_a_run_at_the_users_batch_size_that_the_budget_ends_is_continued(capsys):
    """At B = 16 the factor 4 is the best one, so B0 runs again with 4 times its rate."""
    store = FakeStore()
    steps = {(16, 0.5): 90, (16, 1.0): 60, (16, 2.0): 40, (16, 4.0): 30, (16, 8.0): 30}
    course = scripted(store, steps | {(4, 4.0): 0})
    course.run_at(16)
    assert course.runs[-1] == (4, 4.0) and "raced" not in store.values
    assert store.values["untested_rate"][0] == "small"
    assert "did not meet the goal" not in capsys.readouterr().err
    again = scripted(store, {(4, 4.0): 50})
    again.resume()
    assert again.runs == [(4, 4.0)] and store.values["raced"] == [16]
    assert store.values["untested_rate"] == []
    assert "50 steps instead of 100" in capsys.readouterr().err


def test_without_time_for_the_users_batch_size_the_rate_is_named():
    """Two trainings of 100 steps take 2 s. The runs at B = 16 leave less than half of one."""
    store = FakeStore(tried=[[16, 2.0, MET, 40], [16, 4.0, MET, 30], [16, 8.0, MET, 30]])
    course = scripted(store, {})
    object.__setattr__(course, "affordable_steps", lambda batch_size: 49.0)
    assert course._rerun_user_size(4.0) and not course.runs
    assert store.values["untested_rate"] == ["small", "model.lr = 0.40"]


def test_another_rate_waits_for_a_larger_budget(capsys):
    """The rate 0.5 took 90 steps, 0.9 s. All runs may take 2 s, but the budget ends before."""
    store = FakeStore(tried=[[16, 0.5, MET, 90]])
    course = scripted(store, {})
    course.clock.budget = 0.8 + MIN_ANSWER_SECONDS
    course.resume()
    assert course.runs == [] and "raced" not in store.values
    assert "larger --budget" in capsys.readouterr().err
    again = scripted(store, {(16, 1.0): 95})
    again.resume()
    assert again.runs == [(16, 1.0)] and store.values["raced"] == [16]


def test_the_announced_time_has_the_start_of_ranks():
    question = question_with(FakeStore(), 1e-12)
    without = question.other_seconds(6)
    question.times.start_of_ranks = 7.0
    assert question.other_seconds(6) == pytest.approx(without + 42.0)


def test_the_announced_training_takes_place_on_the_ranks():
    """Two ranks need 30 ms for a step of 4 examples, one device 14 ms."""
    timed = [Timed(m, 0.01 + 1e-3 * m) for m in (1, 2, 4, 8)]
    timed += [Timed(m, 0.03, 2) for m in (2, 4)]
    times = StepTimes(timed, check=0.05, largest=8, reason=SPENT)
    user = setup(devices=2)
    question = Question(user, Options(), FakeStore(), FakeProbes(user), None, times, 10, plan=PLAN)
    assert question.training_seconds == pytest.approx(4 * (0.03 + 0.05), rel=0.05)


def test_ranks_that_could_not_be_timed_take_as_long_as_one_device():
    times = StepTimes([Timed(m, 0.01) for m in (1, 4, 16)], check=0.0, largest=16, reason=SPENT)
    user = setup(devices=2)
    question = Question(user, Options(), FakeStore(), FakeProbes(user), None, times, 10, plan=PLAN)
    assert question.step_seconds(4, 2) == math.inf
    assert question.training_seconds == pytest.approx(4 * 0.01, rel=0.01)
    assert course_of(question).affordable_steps(16) == pytest.approx(80, rel=0.01)


def test_the_announced_time_has_what_is_not_training(capsys):
    question = question_with(FakeStore(), 1e-12)
    question.times.waited = 0.5
    # 4 s of the answer and 1 s of each run, beside another program.
    assert question.other_seconds(6) == pytest.approx(20.0)
    course = course_of(question)
    question.times.check = 0.0
    course.announce()
    # Two pilots of 40 steps, 10 ms each, and the rest.
    assert course.clock.announced == pytest.approx(0.8 + 20.0, abs=0.1)
    assert "at most about 21 s in all" in capsys.readouterr().err


@pytest.mark.parametrize(("budget", "ends"), [(0.5, True), (math.inf, False)])
def test_a_budget_below_the_announced_time_is_named(capsys, budget, ends):
    question = question_with(FakeStore(), 1e-12)
    clock = Clock(budget, SimpleNamespace(keep=lambda **values: None), 0.0)
    print_cost(question, clock)
    said = " ".join(capsys.readouterr().err.split())
    assert ("The budget ends it after" in said) == ends
    assert ("it is at most about" in said) != ends


def test_a_resumed_command_keeps_what_the_first_one_announced(capsys):
    kept = {}
    store = SimpleNamespace(keep=lambda **values: kept.update(values))
    Clock(math.inf, store, 0.0).announce(100.0)
    assert kept == {"announced": 100.0}
    course = course_of(question_with(FakeStore(), 1e-12))
    clock = Clock(math.inf, store, spent=90.0, announced=kept["announced"])
    course = dataclasses.replace(course, clock=clock)
    course.announce()
    assert course.clock.announced == kept["announced"] == 100.0
    assert " in all" not in capsys.readouterr().err
