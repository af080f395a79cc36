"""The recommended configuration, as `fit` takes it."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Trainer

from lit_dps.advice.answer import Answer
from lit_dps.advice.probe_study import best_rates
from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.rates import RATE_NAMES
from lit_dps.core.record import StudyRecord
from lit_dps.core.trial_config import plain
from lit_dps.storage.advice_store import AdviceStore
from lit_dps.storage.urls import without_password
from lit_dps.study.setup import StudySetup
from lit_dps.training.trainer_rules import as_list
from lit_dps.training.workload import locate

PREDICTION = "lit_dps.advice.prediction.PredictionCallback"


def rate_key(setup: StudySetup) -> str:
    """The metaparameter that is the learning rate; empty where none is searched."""
    return next((key for key in setup.study.space if key.rpartition(".")[2] in RATE_NAMES), "")


def parameters_at(record: StudyRecord | None, found: Answer) -> dict[str, Any] | None:
    """The metaparameters of the best row: of the nearest best trial, but the rate, by its law. None
    without any."""
    complete = (
        [] if record is None else [cell for cell in Analysis(record).cells if cell.best is not None]
    )
    if found.best is None or not complete:
        return None
    size, rates = int(found.best["batch_size"]), best_rates(record)
    nearest = min(complete, key=lambda cell: abs(cell.cell.batch_size / size - 1))
    params = dict(nearest.best.trial.params)
    if rates is not None and (rate := rates.at(size, params)) is not None:
        params[rates.source.rate] = float(rate)
    return params


def of_probes(
    setup: StudySetup,
    probe: StudySetup,
    record: StudyRecord | None,
    found: Answer,
    store: AdviceStore,
) -> dict[str, Any] | None:
    """The best row as the probes say how to train it; None without one."""
    if (params := parameters_at(record, found)) is None:
        return None
    return _configuration(setup, probe, params, found, store, predicted=True)


def of_branches(
    setup: StudySetup, forked: StudySetup, found: Answer, store: AdviceStore
) -> dict[str, Any] | None:
    """The best row with the metaparameters of the run that was forked, its rate as the branches had
    it.

    It holds a prediction where that run met its goal: else no steps to a goal are known.
    """
    if found.best is None or found.rate is None:
        return None
    params = forked.middle
    params[found.rate.name] = float(found.rate.at(found.best["batch_size"]))
    return _configuration(setup, forked, params, found, store, found.law.met)


def _configuration(
    setup: StudySetup,
    probe: StudySetup,
    params: Mapping[str, Any],
    found: Answer,
    store: AdviceStore,
    predicted: bool,
) -> dict[str, Any]:
    best = found.best
    size, devices = int(best["batch_size"]), int(best["devices"])
    specs = copy.deepcopy({"model": dict(probe.workload.model), "data": dict(probe.workload.data)})
    parts, largest = setup.workload.accumulated, found.step_time.largest
    if largest is not None:  # memory holds no more at once
        parts = max(parts, -(-size // (devices * largest)))
    for key, value in {**params, probe.workload.batch_size_key: size // parts}.items():
        node, name = locate(specs, key, "study.space")
        node[name] = value
    standard = {
        name: p.default for name, p in inspect.signature(Trainer.__init__).parameters.items()
    }
    trainer = {
        key: value
        for key, value in probe.workload.trainer.items()
        if value != standard.get(key, ...)
    }
    trainer = {
        key: value
        for key, value in trainer.items()
        if key not in ("max_epochs", "num_sanity_val_steps")
    }
    trainer |= {"devices": devices} | ({"accumulate_grad_batches": parts} if parts > 1 else {})
    callbacks = as_list(trainer.get("callbacks"))
    if predicted:
        ends = ("_low", "", "_high")
        limits = {
            name: [float(best[f"{name}{end}"]) for end in ends] for name in ("steps", "hours")
        }
        where = {"storage": without_password(store.url), "study": setup.study.name}
        told = {
            "class_path": PREDICTION,
            "init_args": {**where, "batch_size": size, "devices": devices, **limits},
        }
        callbacks.append(told)
    trainer |= {"callbacks": callbacks} if callbacks else {}
    others = {}
    if setup.optim.delay:
        others["optim"] = plain(setup.optim)
    if setup.local.on:
        others["local"] = plain(setup.local)
    # whole checks: those are predicted, and `fit` is to show what a check finds
    goal = {
        key: value
        for key, value in plain(setup.goal).items()
        if value is not None and key != "early_reject"
    }
    return {**specs, "trainer": trainer, "goal": goal, **others}
