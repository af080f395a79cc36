"""The recommended rate is scaled as the branches' rates were: by the optimizer that really trained
them."""

from __future__ import annotations

import dataclasses
import math
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from lit_dps.advice import branch_run
from lit_dps.advice.branch_run import (
    affordable_callback,
    announcement,
    branch_law,
    run_branches,
    sentence_of_fork,
    stored_forks,
)
from lit_dps.advice.costs import Checks
from lit_dps.advice.options import Clock, Options
from lit_dps.advice.question import conclude
from lit_dps.advice.step_time import Timed, fit_step_time
from lit_dps.advice.user_workload import prepare_branches
from lit_dps.core.errors import UserError
from lit_dps.core.search_space import Range
from lit_dps.parallel.process import StopRequest
from lit_dps.readings.branching import BranchCallback, Fork
from lit_dps.storage.advice_store import AdviceStore
from tests.support.errors import raises_about
from tests.unit.advice.test_step_probe import Net, setup

OPTIONS = Options(600, "branch")
FORK = Fork(2, 4, (1, 2, 4), (1.0, 1.0, 1.0), (0.0, 0.01, 0.01), 0.1).to_dict()


class Adam(Net):
    def __init__(self, lr: float = 0.1, weight_decay: float = 0.1, room: int = 10**9):
        super().__init__(lr, room)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-3)


class WantsTrainer(Adam):
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-3 / self.trainer.max_epochs)


class MeetsGoal(Adam):
    """Meets its goal at the third of four checks, after the last fork."""

    def __init__(self, lr: float = 0.1):
        super().__init__(lr)
        self.errors = [0.9, 0.9, 0.0]


class Plain(Net):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-3 / self.trainer.max_epochs)


# Forks of a second: the rates of branches do not depend on their length.
SHORT = {"MIN_WINDOW": 8, "MIN_STEPS_OF_LARGEST": 2, "REPETITIONS": 2}


@pytest.fixture
def short_forks(monkeypatch):
    for name, value in SHORT.items():
        monkeypatch.setattr(branch_run, name, value)


def asked(module: str, **space):
    given = setup()
    model = {"class_path": f"{__name__}.{module}"}
    box = {"model.lr": Range(0.01, 1.0, "log")} | {
        f"model.{key}": box for key, box in space.items()
    }
    study, workload = (
        dataclasses.replace(given.study, space=box),
        dataclasses.replace(given.workload, model=model),
    )
    return dataclasses.replace(given, study=study, workload=workload)


def power(given, store: AdviceStore) -> float:
    """Of B that the recommended rate grows with."""
    probe, adaptive, *_ = prepare_branches(given)
    step = fit_step_time([Timed(m, 0.01 + 1e-4 * m) for m in (4, 8, 16)])
    times = SimpleNamespace(check=0.1)
    question = SimpleNamespace(
        plan=None,
        checks=Checks(0.1, 1),
        setup=given,
        options=OPTIONS,
        store=store,
        probes=SimpleNamespace(setup=probe, record=lambda: None),
        adaptive=adaptive,
        times=times,
        step_time=step,
        sizes_within_budget=lambda law: [4, 16],
    )
    found = conclude(question)
    assert found.rate.at(4) == pytest.approx(0.1), "the middle of the box at the own batch size"
    return math.log(found.rate.at(16) / found.rate.at(4), 4)


@pytest.mark.parametrize(
    ("module", "space", "expected"),
    [
        ("Adam", {"weight_decay": Range(0.01, 0.1, "log")}, 0.5),
        pytest.param("WantsTrainer", {}, 0.5, marks=pytest.mark.long),
        pytest.param("Plain", {}, 1.0, marks=pytest.mark.long),
    ],
)
def test_the_rate_is_scaled_as_that_of_the_branches(tmp_path, short_forks, module, space, expected):
    given, store = asked(module, **space), AdviceStore(f"sqlite:///{tmp_path}/study.db", "s")
    probe = prepare_branches(given).setup
    run_branches(probe, 1.0, store, Clock(600, store, 0.0), StopRequest())
    assert store.read()["branch_adaptive"] is (expected == 0.5)
    assert power(given, store) == pytest.approx(expected)


def test_the_forked_run_has_the_users_values():
    given = asked("Adam", weight_decay=Range(0.01, 0.1, "log"))
    model = {**given.workload.model, "init_args": {"lr": 0.02, "weight_decay": 0.03}}
    workload = dataclasses.replace(given.workload, model=model)
    probe, adaptive, notes, *_ = prepare_branches(dataclasses.replace(given, workload=workload))
    assert probe.middle == pytest.approx({"model.lr": 0.02})
    assert probe.workload.model["init_args"]["weight_decay"] == 0.03
    assert adaptive.beta2 == 0.999
    assert "model.lr = 0.02, model.weight_decay = 0.03" in notes[-1]
    user = {"class_path": "lit_dps.training.AdamScalingCallback", "init_args": {"reference": 8}}
    trainer = {**workload.trainer, "callbacks": [user]}
    workload = dataclasses.replace(workload, trainer=trainer)
    scaled = prepare_branches(dataclasses.replace(given, workload=workload))
    assert scaled.adaptive is None, "the user's callback has another reference"
    assert scaled.setup.workload.trainer["callbacks"] == [user]


@pytest.mark.parametrize(("module", "expected"), [("Adam", 0.5), ("Net", 1.0)])
def test_advice_that_does_not_say_how_its_branches_were_scaled_goes_by_the_module(
    tmp_path, module, expected
):
    store = AdviceStore(f"sqlite:///{tmp_path}/study.db", "s")
    store.append("branches", FORK)
    assert power(asked(module), store) == pytest.approx(expected)


@pytest.mark.parametrize("is_scaled", [True, False])
def test_the_recommended_run_scales_as_the_branches_did(tmp_path, short_forks, is_scaled):
    given, store = asked("Adam"), AdviceStore(f"sqlite:///{tmp_path}/study.db", "s")
    if not is_scaled:  # the branches of an earlier version, as `migrate` converts them
        store.append("branches", {**FORK, "step": 1})
        store.keep(branch_scaled=False)
    probe = prepare_branches(given).setup
    run_branches(probe, 1.0, store, Clock(600, store, 0.0), StopRequest())
    assert store.read()["branch_scaled"] is is_scaled


@pytest.mark.parametrize(("max_examples", "steps"), [(None, 8), (13, 4), (16, 4), (17, 6)])
def test_a_forked_run_without_the_goal_took_the_steps_of_its_budget(max_examples, steps):
    """The forked run has B = 4, and a validation after every second step."""
    given = asked("Adam")
    goal = dataclasses.replace(given.goal, check_interval=2, max_steps=8, max_examples=max_examples)
    law = branch_law({"branches": [FORK]}, dataclasses.replace(given, goal=goal))
    assert (law.batch_size, law.steps, law.met) == (4, steps, False)


def test_the_window_has_enough_steps_and_the_branches_fit_into_the_time():
    forks = [100, 200, 400]
    few = affordable_callback(forks, 1.0, 3400)
    # Four repetitions of three branches of 256 batches, and 16 / 3 forward passes for the loss.
    assert few.factors == (1, 2, 4) and few.window == 256 and few.stretches == 64
    assert few.cost == 4 * 3 * (256 + 6)
    many = affordable_callback(forks, 1.0, 1e9)
    assert many.factors[-1] == 32 and many.stretches == 32 and many.window == 1024
    # Three forks of three factors need 3 x 4 x 4 x 267 steps, after 400 of the run.
    assert affordable_callback(forks, 1.0, 400 + 12 * 4 * 267).factors == (1, 2, 4, 8)
    assert affordable_callback(forks, 1.0, 399 + 12 * 4 * 267).factors == (1, 2, 4)
    with raises_about(UserError, "--budget", "--method pilot", "54 min"):
        affordable_callback(forks, 1.0, 3243)


def test_the_cost_is_announced_in_trainings():
    text = announcement(affordable_callback([100], 0.01, 60), 0.01, 800)
    assert "each of 1 forks trains 4 branches 4 times on 256 batches: in all 43 s" in text
    assert "as long as 5.34 trainings of 800 steps" in text
    assert "cost more than a probe" in text


def test_a_fork_says_one_sentence():
    fork = Fork(7, 4, (1, 2, 4), (1.0, 1.0, 1.5), (0.0, 0.05, 0.1), 0.1)
    assert sentence_of_fork(fork) == "Batches up to 8 (2 B0) lose nothing at step 7; 16 loses"
    unsure = dataclasses.replace(fork, margins=(0.0, 0.2, 0.6))
    assert sentence_of_fork(unsure) == "No batch above 4 is shown to lose nothing at step 7"


def test_forks_of_earlier_versions_show_nothing():
    earlier = {**FORK}
    del earlier["margins"]
    assert stored_forks({"branches": [earlier]}) == []
    same_examples = {**FORK, "margins": [0.0, 0.0, 0.0]}
    unknown = {**FORK, "margins": [0.0, None, None]}
    (kept,) = stored_forks({"branches": [same_examples, unknown]})
    assert math.isnan(kept.margins[1])
    assert branch_law({"branches": [earlier]}, setup()) is None


def test_a_fork_at_a_rate_of_0_is_stored_and_not_in_the_law():
    unknown = [None] * len(FORK["losses"])
    at_0 = {**FORK, "step": 1, "losses": unknown, "margins": unknown, "has_no_rate": True}
    assert [fork.step for fork in stored_forks({"branches": [at_0]})] == [1]
    assert branch_law({"branches": [at_0]}, setup()) is None
    both = branch_law({"branches": [at_0, {**FORK}]}, setup())
    assert both == branch_law({"branches": [{**FORK}]}, setup())


@pytest.mark.parametrize(
    ("stored", "has_ended"),
    [
        ({}, True),
        ({"branch_factors": [1, 2, 4]}, False),
        ({"branch_factors": [1, 2, 4], "branch_ended": True}, True),
    ],
)
def test_advice_of_an_earlier_version_with_all_forks_has_ended(stored, has_ended):
    stored = {"branches": [FORK]} | stored
    assert branch_run._has_ended(stored, [2]) is has_ended
    assert not branch_run._has_ended(stored, [2, 4])


def fork(url: str, seconds: float, kill_after: int | None = None) -> dict:
    """Fork a run of `MeetsGoal`, with some seconds left, and return what is stored.

    Args:
        url: The storage.
        seconds: The budget that remains.
        kill_after: The number of stored forks after which the process kills itself.
    """
    store = AdviceStore(url, "s")
    append = store.append

    def append_and_kill(key, value):
        append(key, value)
        if len(store.read()[key]) == kill_after:
            os.kill(os.getpid(), signal.SIGKILL)

    store.append = append_and_kill
    probe = prepare_branches(asked("MeetsGoal")).setup
    run_branches(probe, 1.0, store, Clock(seconds, store, 0.0), StopRequest())
    return store.read()


KILLED = """
import sys
from lit_dps.advice import branch_run
from lit_dps.advice.costs import Checks
from tests.unit.advice import test_branch_run as test
vars(branch_run).update(test.SHORT)
test.fork(sys.argv[1], 600, kill_after=int(sys.argv[2]))
"""


@pytest.mark.long  # tests/e2e/test_pilot.py has commands that are killed
@pytest.mark.parametrize(("kill_after", "forked_again"), [(1, {2}), (2, set())])
def test_a_killed_command_resumes_to_the_answer_of_an_unbroken_one(
    tmp_path, short_forks, monkeypatch, capsys, kill_after, forked_again
):
    """A budget that is too small for another fork makes none, and says so."""
    whole = fork(f"sqlite:///{tmp_path}/whole.db", 600)
    assert [each["step"] for each in whole["branches"]] == [1, 2]
    assert whole["branch_steps"] == 3 and whole["branch_ended"]

    url = f"sqlite:///{tmp_path}/killed.db"
    done = subprocess.run([sys.executable, "-c", KILLED, url, str(kill_after)])
    assert done.returncode == -signal.SIGKILL
    stored = AdviceStore(url, "s").read()
    assert len(stored["branches"]) == kill_after and "branch_steps" not in stored

    seen = set()
    measure = BranchCallback._losses_of_branches

    def watch(self, trainer, module, repetition):
        seen.add(trainer.global_step)
        return measure(self, trainer, module, repetition)

    monkeypatch.setattr(BranchCallback, "_losses_of_branches", watch)
    if forked_again:
        fork(url, 20)
        assert not seen and "larger --budget" in capsys.readouterr().err
    resumed = fork(url, 600)
    assert seen == forked_again
    unequal = {"spent"}
    assert {k: v for k, v in resumed.items() if k not in unequal} == {
        k: v for k, v in whole.items() if k not in unequal
    }
    seen.clear()
    monkeypatch.setattr(branch_run, "probe_run", None)
    assert fork(url, 60) == resumed, "nothing is trained again"
