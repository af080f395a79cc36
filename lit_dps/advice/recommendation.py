"""The recommended run: its metaparameters, and its configuration for `fit`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Trainer

from lit_dps.advice.answer import Answer
from lit_dps.advice.branch_law import Branched
from lit_dps.advice.pilot_plan import with_values
from lit_dps.advice.prediction import describe_goal, settings_texts
from lit_dps.advice.question import Question
from lit_dps.advice.user_workload import prepare_branches
from lit_dps.core.trial_config import OptimConfig, plain
from lit_dps.storage.urls import without_password
from lit_dps.study.setup import StudySetup
from lit_dps.training.trainer_rules import as_list

PREDICTION_CALLBACK = "lit_dps.advice.prediction.PredictionCallback"
# Trainer arguments that a study sets itself.
SET_BY_STUDY = ("max_epochs", "num_sanity_val_steps")


def recommended_params(question: Question, result: Answer) -> dict[str, Any] | None:
    """Return the metaparameters of the best row by configuration key.

    Returns:
        None without a best row, and for branches.
    """
    if result.best is None or question.plan is None:
        return None
    assert result.rate is not None
    return {question.plan.rate_key: result.rate.at(int(result.best["batch_size"]))}


def recommended_config(question: Question, result: Answer) -> dict[str, Any] | None:
    """Return the configuration of the best row for `fit`; None without one."""
    if isinstance(result.law, Branched):
        return _config_of_branches(question, result, result.law)
    params = recommended_params(question, result)
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
        setup = prepare_branches(question.setup, scales=False).setup
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
    parts = result.step_time.parts(size, devices)
    values = {**params, setup.workload.batch_size_key: size // parts}
    workload = with_values(setup.workload, values)
    trainer = _changed_trainer_arguments(setup.workload.trainer)
    trainer["devices"] = devices
    if parts > 1:
        trainer["accumulate_grad_batches"] = parts
    goal = {}
    for key, value in plain(question.setup.goal).items():
        # Full validations are predicted, and `fit` shows what they measure.
        if value is not None and key != "early_reject":
            goal[key] = value
    config: dict[str, Any] = {
        "model": workload.model,
        "data": workload.data,
        "trainer": trainer,
        "goal": goal,
    }
    if question.setup.optim != OptimConfig():
        config["optim"] = plain(question.setup.optim)
    if question.setup.local.on:
        config["local"] = plain(question.setup.local)
    callbacks = as_list(trainer.get("callbacks"))
    if is_predicted:
        callbacks.append(_prediction_callback(question, best, config))
    if callbacks:
        trainer["callbacks"] = callbacks
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


def _prediction_callback(
    question: Question, best: Mapping[str, Any], config: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the configuration of the callback that compares a run with its prediction.

    Args:
        question: The question.
        best: The recommended row.
        config: The other sections of the configuration.
    """
    arguments: dict[str, Any] = {
        "storage": without_password(question.store.url),
        "study": question.setup.study.name,
        "batch_size": int(best["batch_size"]),
        "devices": int(best["devices"]),
    }
    for name in ("steps", "hours"):
        arguments[name] = [float(best[f"{name}{end}"]) for end in ("_low", "", "_high")]
    arguments["goal"] = describe_goal(question.setup.built_goal)
    settings = []
    for section, content in config.items():
        settings += [(f"{section}.{key}", value) for key, value in content.items()]
    arguments["workload"] = settings_texts(settings)
    return {"class_path": PREDICTION_CALLBACK, "init_args": arguments}
