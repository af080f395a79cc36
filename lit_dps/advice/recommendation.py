"""The recommended run: its metaparameters, its configuration for `fit`, and its verification."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
import time
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Trainer

from lit_dps.advice.answer import Answer
from lit_dps.advice.branch_law import Branched
from lit_dps.advice.one_run import runs_of_configuration
from lit_dps.advice.options import Clock, print_line
from lit_dps.advice.probe_study import best_rates
from lit_dps.advice.question import Question
from lit_dps.advice.step_probe import fit_threads, of_one_device
from lit_dps.advice.user_workload import probe_setup
from lit_dps.analysis.analysis import Analysis
from lit_dps.core.attempt import Attempt
from lit_dps.core.goal import Goal
from lit_dps.core.record import StudyRecord
from lit_dps.core.text import format_duration
from lit_dps.core.trial import Cell, Status, Trial, TrialResult
from lit_dps.core.trial_config import plain
from lit_dps.parallel.process import Interrupted, StopRequest
from lit_dps.storage.advice_store import AdviceStore
from lit_dps.storage.urls import without_password
from lit_dps.study.probe_run import engine_run
from lit_dps.study.setup import StudySetup
from lit_dps.training.trainer_rules import as_list
from lit_dps.training.workload import locate

PREDICTION_CALLBACK = "lit_dps.advice.prediction.PredictionCallback"
# Trainer arguments that a study sets itself.
SET_BY_STUDY = ("max_epochs", "num_sanity_val_steps")
VERIFICATION_RUNS = 3
# A run that has not met the goal after this multiple of K counts as one that needs more steps.
MAX_STEPS_OVER_K = 3.0


def recommended_params(
    question: Question, record: StudyRecord | None, result: Answer
) -> dict[str, Any] | None:
    """Return the metaparameters of the best row: of the nearest best trial, with the rate's law.

    Args:
        question: The question.
        record: The study of the probes.
        result: The answer.

    Returns:
        None without a best row or a best trial.
    """
    if result.best is None or record is None:
        return None
    if question.plan is not None:
        assert result.rate is not None
        return {question.plan.rate_key: result.rate.at(int(result.best["batch_size"]))}
    cells = [cell for cell in Analysis(record).cells if cell.best is not None]
    if not cells:
        return None
    size = int(result.best["batch_size"])
    nearest = min(cells, key=lambda cell: abs(cell.cell.batch_size / size - 1))
    assert nearest.best is not None
    params = dict(nearest.best.trial.params)
    rates = best_rates(record)
    if rates is not None:
        rate = rates.at(size, params)
        if rate is not None:
            params[rates.source.rate_key] = float(rate)
    return params


def recommended_config(
    question: Question, record: StudyRecord | None, result: Answer
) -> dict[str, Any] | None:
    """Return the configuration of the best row for `fit`; None without one.

    Args:
        question: The question.
        record: The study of the probes.
        result: The answer.
    """
    if isinstance(result.law, Branched):
        return _config_of_branches(question, result, result.law)
    params = recommended_params(question, record, result)
    if params is None:
        return None
    return _config(question, question.probes.setup, params, result, is_predicted=True)


def _config_of_branches(question: Question, result: Answer, law: Branched) -> dict[str, Any] | None:
    """Return the configuration with the metaparameters of the forked run, and the branches' rate.

    It has a prediction if that run met its goal; otherwise no steps to a goal are known.
    """
    if result.best is None or result.rate is None:
        return None
    setup = question.probes.setup
    if not question.store.read().get("branch_scaled", False):
        setup = probe_setup(question.setup, question.options.trials, adaptive=None)
    params = setup.middle
    rate = result.rate.at(result.best["batch_size"])
    assert rate is not None  # rates and steps of branches have the same range
    params[result.rate.name] = float(rate)
    return _config(question, setup, params, result, is_predicted=law.met)


def _config(
    question: Question,
    setup: StudySetup,
    params: Mapping[str, Any],
    result: Answer,
    is_predicted: bool,
) -> dict[str, Any]:
    """Return a configuration of the best row.

    Args:
        question: The question.
        setup: The study whose workload is trained.
        params: Metaparameters by configuration key.
        result: The answer.
        is_predicted: Whether a callback compares the run with its prediction.
    """
    best = result.best
    assert best is not None
    size = int(best["batch_size"])
    devices = int(best["devices"])
    parts = question.setup.workload.accumulated
    largest = result.step_time.largest
    if largest is not None:
        # A larger batch does not fit in memory at once.
        parts = max(parts, -(-size // (devices * largest)))
    specs = {"model": dict(setup.workload.model), "data": dict(setup.workload.data)}
    specs = copy.deepcopy(specs)
    for key, value in {**params, setup.workload.batch_size_key: size // parts}.items():
        node, name = locate(specs, key, "study.space")
        node[name] = value
    trainer = _changed_trainer_arguments(setup.workload.trainer)
    trainer["devices"] = devices
    if parts > 1:
        trainer["accumulate_grad_batches"] = parts
    callbacks = as_list(trainer.get("callbacks"))
    if is_predicted:
        callbacks.append(_prediction_callback(question, best))
    if callbacks:
        trainer["callbacks"] = callbacks
    goal = {}
    for key, value in plain(question.setup.goal).items():
        # Full validations are predicted, and `fit` shows what they measure.
        if value is not None and key != "early_reject":
            goal[key] = value
    config: dict[str, Any] = {**specs, "trainer": trainer, "goal": goal}
    if question.setup.optim.delay:
        config["optim"] = plain(question.setup.optim)
    if question.setup.local.on:
        config["local"] = plain(question.setup.local)
    return config


def _changed_trainer_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the trainer arguments that differ from their defaults and that a user may set."""
    parameters = inspect.signature(Trainer.__init__).parameters
    changed = {}
    for key, value in arguments.items():
        is_default = key in parameters and value == parameters[key].default
        if not is_default and key not in SET_BY_STUDY:
            changed[key] = value
    return changed


def _prediction_callback(question: Question, best: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of the callback that compares a run with its prediction."""
    arguments: dict[str, Any] = {
        "storage": without_password(question.store.url),
        "study": question.setup.study.name,
        "batch_size": int(best["batch_size"]),
        "devices": int(best["devices"]),
    }
    for name in ("steps", "hours"):
        arguments[name] = [float(best[f"{name}{end}"]) for end in ("_low", "", "_high")]
    return {"class_path": PREDICTION_CALLBACK, "init_args": arguments}


def verify_recommendation(
    setup: StudySetup,
    batch_size: int,
    params: Mapping[str, Any],
    k: float,
    store: AdviceStore,
    clock: Clock,
    stop: StopRequest,
) -> None:
    """Train a recommended configuration on one device to the goal, and store the steps of each run.

    There are `VERIFICATION_RUNS` runs on fresh seeds, or fewer if the remaining time ends before.

    Args:
        setup: The study that probes.
        batch_size: The batch size of an optimizer step.
        params: Metaparameters by configuration key.
        k: Steps to the goal by the law.
        store, clock, stop: The stored runs, the clock of the budget, and the request to stop.

    Raises:
        Interrupted: if the user asked to stop.
    """
    stored = runs_of_configuration(store.read().get("confirmed", []), batch_size, params)
    goal = _verification_goal(setup.goal_of_trials, k)
    end = time.monotonic() + clock.remaining
    torch.set_num_threads(fit_threads(setup))
    one_device = of_one_device(setup)
    longest = max((run["seconds"] for run in stored), default=0.0)
    for number in range(len(stored) + 1, VERIFICATION_RUNS + 1):
        if time.monotonic() + longest > end:
            return
        trial = Trial(Cell(batch_size), 0, dict(params), setup.study.seed, repeat=number)
        result = _run_until(end, one_device, Attempt(trial, goal), stop)
        if result is None:
            return
        if result.status is Status.FAILED:
            print_line(f"  it fails: {result.failure}")
            return
        store.append("confirmed", _stored_run(result, goal))
        clock.save()
        longest = max(longest, result.seconds)
        print_line(f"  run {number} at B = {batch_size}: {_describe(result)}")


def _run_until(
    end: float, setup: StudySetup, attempt: Attempt, stop: StopRequest
) -> TrialResult | None:
    """Train a trial; return its result, or None if the time `end` came before.

    Raises:
        Interrupted: if the user asked to stop.
    """

    def at_check() -> None:
        stop.check()
        if time.monotonic() > end:
            raise Interrupted("the budget")

    try:
        return engine_run(setup, attempt, at_check)
    except Interrupted:
        stop.check()
        return None


def _verification_goal(goal: Goal, k: float) -> Goal:
    """Return a goal with max_steps at a multiple of K, rounded up to a validation."""
    steps = min(MAX_STEPS_OVER_K * k, goal.max_steps)
    max_steps = max(1, math.ceil(steps / goal.check_interval)) * goal.check_interval
    return dataclasses.replace(goal, max_steps=max_steps)


def _stored_run(result: TrialResult, goal: Goal) -> dict[str, Any]:
    """Return a run as the advice store keeps it."""
    return {
        "batch_size": result.trial.cell.batch_size,
        "params": dict(result.trial.params),
        "steps": result.steps,
        "most": goal.max_steps,
        "seconds": result.seconds,
        "timed": dict(result.timed),
    }


def _describe(result: TrialResult) -> str:
    """Return the steps and seconds of a run as text."""
    seconds = format_duration(result.seconds, 2)
    if result.steps:
        return f"goal met after {result.steps} steps, {seconds}"
    return f"goal not met in {result.steps_run} steps, {seconds}"
