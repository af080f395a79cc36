"""Writes studies of made-up trials in the storage format of lit_dps.storage.read."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np
import optuna

from lit_dps.analysis.analysis import Analysis
from lit_dps.core.goal import Goal
from lit_dps.core.record import grid
from lit_dps.core.search_space import Range
from lit_dps.core.trial import LIPSCHITZ, THEORY, Cell, Status, Trial, TrialResult
from lit_dps.storage import schema
from lit_dps.storage.read import read_study
from lit_dps.storage.samplers import distributions as store_distributions
from lit_dps.storage.schema import (
    POINT_ATTR,
    REPEAT_ATTR,
    RESULT_ATTR,
    cell_study_name,
    encode_result,
    repeats_study_name,
)

GOAL = Goal(0.1, check_interval=16, max_steps=40_000)
SPACE = {
    "model.learning_rate": Range(1e-3, 10.0, "log"),
    "model.momentum": Range(0.5, 0.999, "reverse_log"),
}
STATES = {
    Status.COMPLETE: optuna.trial.TrialState.COMPLETE,
    Status.INCOMPLETE: optuna.trial.TrialState.PRUNED,
    Status.INFEASIBLE: optuna.trial.TrialState.FAIL,
    Status.OUTRACED: optuna.trial.TrialState.PRUNED,
    Status.PAUSED: optuna.trial.TrialState.PRUNED,
    Status.STOPPED: optuna.trial.TrialState.FAIL,
    Status.FAILED: optuna.trial.TrialState.FAIL,
}


def result(
    cell: Cell,
    point: int,
    steps: int | None,
    status: str = "complete",
    params: Mapping | None = None,
    **kept,
):
    """A finished trial; without steps it is incomplete unless `status` says infeasible."""
    status = Status.INCOMPLETE if steps is None and status == "complete" else Status(status)
    return TrialResult(Trial(cell, point, dict(params or {})), status, steps, **kept)


def theory_terms(
    steps,
    loss=2.0,
    floor=0.0,
    beta=1.0,
    lipschitz=(1.0, 1.0),
    squared=(),
    first=1.0,
    rate=0.1,
    at=(),
):
    """Keywords for `result`: the theory's terms of a run of `steps` at a constant rate, measured at
    the steps `at`."""
    theory = {"loss": loss, "gradient_variance": beta, "squared_gradient": first, "floor": floor}
    theory |= {"steps": steps, "rate_sum": rate * steps, "rate_square_sum": rate**2 * steps}
    flags = {f"{THEORY}{name}": value for name, value in theory.items()}
    at = list(at) or list(range(1, 1 + len(lipschitz)))
    squared = list(squared) or [1.0] * len(lipschitz)
    curve = {"step": at, "lipschitz": list(lipschitz), "squared_gradient": squared}
    return {"flags": flags, "readings": {LIPSCHITZ: curve}}


def law_results(
    cell: Cell, trials: int, c1: float, c2: float, space=SPACE, goal: Goal = GOAL, seed: int = 0
):
    """Trials of one cell in a bowl around one best setting whose steps are c1 / B + c2, as a search
    would find them."""
    rng = np.random.default_rng((seed, cell.batch_size, round(1000 * cell.sparsity)))
    centre = 0.3 + 0.04 * math.log2(cell.batch_size)
    results = []
    for point in range(trials):
        units = rng.random(len(space))
        params = {key: box.at(u) for u, (key, box) in zip(units, space.items(), strict=True)}
        push = (
            float(np.mean(units)) - centre
        )  # a higher rate and a higher momentum both make bigger steps
        off = 12 * push**2 + 0.5 * float(np.sum((units - np.mean(units)) ** 2))
        steps = (
            math.ceil((c1 / cell.batch_size + c2) * math.exp(6 * off) / goal.check_interval)
            * goal.check_interval
        )
        curve = {"step": [16, 32], "val_error": [0.9, 0.5], "train_loss": [2.3, 1.5]}
        if push > 0.3:
            curve["train_loss"] = [2.3, math.nan]
            results.append(
                result(cell, point, None, "infeasible", params, curve=curve, seconds=1.0)
            )
        else:
            reached = steps if steps <= goal.max_steps else None
            results.append(
                result(
                    cell,
                    point,
                    reached,
                    params=params,
                    curve=curve,
                    kept={"w": (9, 90)},
                    seconds=2.0,
                )
            )
    return results


def measured(r: TrialResult, goal: Goal = GOAL, interval: int = 100) -> TrialResult:
    """The trial with a curve down to the goal that it met, if it did, and Lipschitz constants every
    `interval` steps.

    At most about 100 checks are kept. The Lipschitz constants rise with the sparsity, fall with the
    steps, and differ between points.
    """
    rng = np.random.default_rng(
        (r.trial.point, r.trial.cell.batch_size, round(1000 * r.trial.cell.sparsity))
    )
    last = r.steps or (goal.max_steps if r.status is Status.INCOMPLETE else 2 * goal.check_interval)
    checks = range(goal.check_interval, last + 1, goal.check_interval)
    steps = sorted({*checks[:: max(1, len(checks) // 100)], last})
    shape = np.exp(-4 * np.array(steps) / last) * rng.lognormal(0, 0.08, len(steps))
    error, loss = (
        goal.value * 1.001 + 0.8 * shape,
        0.1 + 2.2 * shape * rng.lognormal(0, 0.2, len(steps)),
    )
    if r.status is Status.COMPLETE:
        error[-1] = goal.value
    if r.status is Status.INFEASIBLE:
        loss[-1] = math.nan
    at = np.arange(interval, last + 1, interval)
    lipschitz = (
        (2 + 20 * r.trial.cell.sparsity) * rng.lognormal(0, 0.2) * (1 + 3 * np.exp(-at / 300))
    )
    curve = {"step": steps, "val_error": error.tolist(), "train_loss": loss.tolist()}
    smoothness = {
        "step": at.tolist(),
        "lipschitz": lipschitz.tolist(),
        "squared_gradient": (1 / at).tolist(),
    }
    return dataclasses.replace(r, curve=curve, readings={LIPSCHITZ: smoothness})


def law_study(
    storage,
    name="fake",
    batch_sizes=(4, 16, 64, 256),
    laws: Mapping[float, tuple] | None = None,
    trials=16,
    measure=False,
    **kw,
):
    """A whole study whose K* follow `laws`: (c1, c2) by sparsity; with `measure`, as `measured`
    makes its trials."""
    laws = laws or {0.0: (4e4, 60)}
    goal = kw.get("goal", GOAL)
    results = {
        cell: law_results(
            cell, trials, *laws[cell.sparsity], space=kw.get("space", SPACE), goal=goal
        )
        for cell in grid(batch_sizes, laws)
    }
    if measure:
        results = {cell: [measured(r, goal) for r in trials] for cell, trials in results.items()}
    write_study(storage, results, name, trials=trials, **kw)


def analysis_of(
    results: Mapping[Cell, Sequence[TrialResult]], name: str = "fake", **kw
) -> Analysis:
    """The analysis of a study that is written as `write_study` does, and read."""
    storage = optuna.storages.InMemoryStorage()
    write_study(storage, results, name, **kw)
    return Analysis(read_study(storage, name))


def write_study(
    storage,
    results: Mapping[Cell, Sequence[TrialResult]],
    name: str = "fake",
    *,
    trials: int | None = None,
    space: Mapping[str, Range] = SPACE,
    goal: Goal = GOAL,
    running: Mapping[Cell, int] | None = None,
    interrupted: Mapping[Cell, Sequence[int]] | None = None,
    repeated: Mapping[Cell, Sequence[TrialResult]] | None = None,
    **header,
) -> None:
    """Writes a study over the batch sizes and sparsities of the given cells; cells without any
    trial get no study.

    `running` adds started trials to a cell, at points after its last; `interrupted` adds failed
    attempts, without result and before all others, at the given points. `repeated` are the repeats
    of a cell's points. Other keywords replace user attributes of the header.
    """
    running, interrupted = running or {}, interrupted or {}
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(study_name=name, storage=storage)
    seed = header.get("seed", 0)
    attrs = {
        **schema.UNMEASURED,
        "made_by": "lit_dps",
        "uid": "0" * 32,
        "identity": {},
        "about": f"study {name}",
        "workload": "digits",
        "batch_sizes": sorted({cell.batch_size for cell in results}),
        "sparsities": sorted({cell.sparsity for cell in results}),
        "axes": {},
        "trials": max((len(r) for r in results.values()), default=0) if trials is None else trials,
        "seed": seed,
        "trial_seed": seed,
        "goals": [],
        "goal": goal.to_stored(),
        "space": {key: vars(box) for key, box in space.items()},
        "race_factor": None,
        "train_past_goal": False,
        "repeats": {"count": 5 if repeated else 0, "points": 1, "race_factor": 8.0},
        "space_history": [],
        "config": {"study": {"name": name}},
        schema.FORMAT_ATTR: schema.FORMAT,
    }
    for key, value in (attrs | header).items():
        study.set_user_attr(key, value)
    for cell, finished in results.items():
        if not (finished or running.get(cell) or interrupted.get(cell)):
            continue
        study = _create_study(storage, cell_study_name(name, cell), cell)
        for point in interrupted.get(cell, ()):
            _add(study, "FAIL", {POINT_ATTR: point, REPEAT_ATTR: 0}, {}, space)
        for r in finished:
            _add(study, STATES[r.status], _trial_attrs(r), r.trial.params, space, r.steps)
        for i in range(running.get(cell, 0)):
            user = {POINT_ATTR: len(finished) + i, REPEAT_ATTR: 0}
            _add(study, "RUNNING", user, {}, space)
    for cell, finished in (repeated or {}).items():
        study = _create_study(storage, repeats_study_name(name, cell), cell)
        for r in finished:
            _add(study, STATES[r.status], _trial_attrs(r), r.trial.params, space, r.steps)


def _create_study(storage, name: str, cell: Cell) -> optuna.Study:
    study = optuna.create_study(study_name=name, storage=storage)
    study.set_user_attr("batch_size", cell.batch_size)
    study.set_user_attr("sparsity", cell.sparsity)
    study.set_user_attr("axes", dict(cell.axes))
    return study


def _trial_attrs(r: TrialResult) -> dict:
    return {
        POINT_ATTR: r.trial.point,
        REPEAT_ATTR: r.trial.repeat,
        schema.ENVIRONMENT: r.environment,
        schema.STATUS_ATTR: str(r.status),
        RESULT_ATTR: encode_result(r),
    }


def _add(study, state, user_attrs, params, space, value=None):
    state = optuna.trial.TrialState[state] if isinstance(state, str) else state
    distributions = store_distributions({key: space[key] for key in params})
    study.add_trial(
        optuna.trial.create_trial(
            state=state,
            value=value,
            params=dict(params),
            distributions=distributions,
            user_attrs=user_attrs,
        )
    )
