"""The schema: all that is stored of a study, by name. Who reads a database needs this page alone.

Optuna holds the truth. A study NAME is one Optuna study of that name, its *header*, whose user
attributes declare it, and one Optuna study for each *cell* of its grid, "NAME | B=16 S=0.9", whose
trials are the attempts at the cell's points. Repeats of a cell's best points on fresh seeds are in
"NAME | B=16 S=0.9 | repeats", which no reader of K* looks into. MLflow holds a view that can be
made anew from it (`analyze --sync`): an experiment for each workload, in it a run for each study,
below that a run for each cell, below that a run for each trial and each repeat.

The header's own trials are for people, who meet it in Optuna's lists: each tells the K* of a cell,
from the end of the study on (`lit_dps.storage.k_star_trials`), and nothing reads them back. Studies
of earlier versions have none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Integral
from typing import Any

from optuna.trial import TrialState

from lit_dps.core.record import grid
from lit_dps.core.trial import Cell, Status, Trial, TrialResult

# ---- User attributes of the header
# -----------------------------------------------------------------------------------
FORMAT = 1
FORMAT_ATTR, UID, IDENTITY, AXES, REPORTED = "lit_dps_format", "uid", "identity", "axes", "reported"
NOISE = "noise_scale"
MADE_BY = "made_by"
RUNS = "runs"
STEP_TIMING = "step_timing"
RUN_ON = "run_on"
TRIAL_SEED = "trial_seed"
REPEATS = "repeats"
BOXES = "boxes"
ENVIRONMENTS = "environments"
UNREAD = (
    "unread_data"  # in the identity, since a later version: arguments of data that have no digest
)
HEADER_ATTRS = {
    MADE_BY: "lit_dps. It is written first; Optuna studies of other programs lack it. Absent in "
    "earlier studies.",
    FORMAT_ATTR: "Version of this layout: 1. It is written last; a header without it was cut "
    "short.",
    UID: "Tells the study from all others, also from a deleted one of the same name. Absent in "
    "the oldest studies.",
    IDENTITY: "All that decides results, nested: has to be equal whenever the study is taken up "
    "again.",
    "config": "The whole configuration that the study was started with, for the record.",
    "about": "What this study and its trials are, for people that see it in a list. Absent in "
    "earlier studies.",
    "workload": "Name of the workload, and of MLflow's experiment.",
    "goal": "As `lit_dps.core.goal.Goal.stored` gives it.",
    "seed": "The study's seed, from which those of its trials are derived.",
    TRIAL_SEED: "What they are derived from in its place, where best_of says what the points are. "
    "Else absent.",
    "space": "Metaparameter, by configuration key -> the fields of "
    "`lit_dps.core.search_space.Range` or `Choices`.",
    "batch_sizes": "Batch sizes of the grid, sorted. This and what follows can be extended, never "
    "reduced.",
    "sparsities": "Sparsities of the grid, sorted.",
    AXES: "Further axes of the grid: configuration key -> list of values. Absent where there is "
    "none.",
    "trials": "Trials of each cell: points 0 to trials - 1.",
    "goals": "Further values of the goal's metric, sorted. Absent in the oldest studies: none.",
    "slack": "Trials run to slack x K* of their cell; null, or absent in the oldest studies: to "
    "the step budget.",
    NOISE: "As `lit_dps.core.noise_scale.NoiseScale.stored` gives it, of a short run before the "
    "first trial; absent without one.",
    STEP_TIMING: "As `lit_dps.core.step_timing.StepTiming.stored` returns it; absent until a "
    "study was timed.",
    RUN_ON: "True where trials went on to the step budget after their goal; else absent.",
    REPEATS: "The fields of `lit_dps.core.repeats.RepeatPlan`, the largest asked for. Absent "
    "where nothing is repeated.",
    BOXES: "The history of a box that was widened: "
    "`lit_dps.core.space_history.ExpandedSpace.to_dict` of "
    "each, beside space. Else absent.",
    ENVIRONMENTS: "Environments of the trials, the oldest first (`lit_dps.core.environment`). "
    "Absent in the oldest studies.",
    RUNS: "Number of the last `study` command that ran trials, from 1. Absent in earlier studies.",
    REPORTED: "How many results the last analysis at the end of a run was made from.",
}

# ---- User attributes of advice on a study, an Optuna study of its own without trials
# ---------------------------------
ADVICE_SUFFIX = " (advice)"  # behind the study's name; no study's own name has brackets
PROBES_SUFFIX = "-advice"  # likewise, of the study that it probes
ADVICE_ATTRS = {
    "configuration": "What the advice is on: the identity of the study that probes, but for its "
    "trials.",
    "max_steps": "The goal.max_steps that a short run proposed; absent if the user set it, and in "
    "earlier versions.",
    "environment": "Code and data of the first measurement (`lit_dps.core.environment`); absent "
    "in earlier versions.",
    "spent": "Seconds that asking has taken, all runs of the command together.",
    "timed": "Steps that were timed: lists of the fields of `lit_dps.advice.step_time.Timed`.",
    "check": "Seconds of a check of the validation split, as it was timed.",
    "largest": "The largest batch of one device, why no larger one was timed, and whether that is "
    "for want of memory.",
    "waited": "Share of the time of timing steps that the process waited for a CPU; absent in "
    "earlier versions.",
    "parameters": "Of the network.",
    "noise": "As `lit_dps.core.noise_scale.NoiseScale.stored` gives it.",
    "confirmed": "Runs of what is recommended: batch_size, params, steps (null without a goal), "
    "most, seconds, timed.",
    "branches": "Of the method branch: a dict a fork (`lit_dps.readings.branching.Fork.stored`).",
    "branch_adaptive": "Whether the rates of the branches were scaled as of Adam; absent in "
    "earlier versions.",
    "branch_scaled": "Whether second moment and weight decay of all branches were scaled; absent "
    "in earlier versions.",
    "branch_steps": "Steps after which the run that was forked met its goal; absent where it did "
    "not.",
    "outcomes": "Predicted and real steps and hours of runs of `fit` with a recommended "
    "configuration.",
}

# ---- User attributes of a cell
# ---------------------------------------------------------------------------------------
CELL_ATTRS = {
    "batch_size": "Global batch size, in examples.",
    "sparsity": "Share of pruned parameters.",
    AXES: "Values of further axes: configuration key -> value. Absent where there is none.",
    UID: "The study's. A cell with another one was left behind by a deleted study of the same "
    "name.",
}

# ---- Trials: user attributes and states
# ------------------------------------------------------------------------------ The parameters of a
# trial are its metaparameters by configuration key; the value of a complete one is its steps to
# result. The number of a trial identifies the attempt: a point may have several.
POINT_ATTR, OWNER, RESULT_ATTR, FAILED_AT, MERGED_FROM = (
    "point",
    "owner",
    "result",
    "failed_at",
    "merged_from",
)
FAILED_IN = "failed_in"
STATUS_ATTR = "status"
ENVIRONMENT = "environment"
REPEAT_ATTR = "repeat"
TRIAL_ATTRS = {
    POINT_ATTR: "The point: index into the study's Sobol sequence, or in the order of another "
    "sampler.",
    REPEAT_ATTR: "Number of the repeat, from 1. On repeats alone.",
    OWNER: "Process that runs it, or did: `owner` of its `peers`: TOKEN@host:pid, where TOKEN is "
    "a file beside the "
    "storage; host:pid:SESSION on PostgreSQL; host:pid:start in earlier versions. Absent while it "
    "waits.",
    ENVIRONMENT: "Key of the environment that it ran in, among those of the header. Absent in "
    "earlier versions.",
    RESULT_ATTR: "How it ended, by `encode_result`. A finished trial without one was cut short: "
    "its point runs again.",
    STATUS_ATTR: "How it ended, `Status`, for people: Optuna's states are fewer. Absent in trials "
    "of earlier versions.",
    FAILED_AT: "When an attempt of status failed ended, in seconds since the epoch: for people "
    "and earlier versions.",
    FAILED_IN: "What `runs` of the header was when an attempt of status failed ended: later "
    "commands run its point "
    "again. Absent in trials of earlier versions and merged ones, which any command runs again.",
    MERGED_FROM: "Where `merge` took it over from.",
}
# Its intermediate values are up to 32 values of the goal's metric by step, for Optuna's plots and
# dashboard; the whole curve is in its result. Earlier versions reported none. One that was pruned
# has no value, as before. A trial WAITs from when its point is enqueued and is RUNNING from when a
# worker claims it.
STATES = {
    Status.COMPLETE: TrialState.COMPLETE,
    **dict.fromkeys((Status.INCOMPLETE, Status.OUTRACED, Status.PAUSED), TrialState.PRUNED),
    **dict.fromkeys((Status.INFEASIBLE, Status.STOPPED, Status.FAILED), TrialState.FAIL),
}

# ---- Trials of the header: a cell's K* is the value, its axes that are numbers are the parameters
# --------------------
CELL_ATTR, BEST_POINT, BEST_ATTR = "cell", "best_point", "metaparameters"
OUTCOME_ATTRS = {
    CELL_ATTR: "The cell as `str(Cell)` has it. Of several trials of a cell the last holds.",
    BEST_POINT: "The point whose trial gave K*.",
    BEST_ATTR: "Its metaparameters, by configuration key.",
}

# ---- Tags of MLflow's runs
# -------------------------------------------------------------------------------------------
NAME_TAG, KIND_TAG, CELL_TAG, POINT_TAG, REPEAT_TAG, ATTEMPT_TAG, STATUS_TAG, FAILURE_TAG = (
    f"lit_dps.{key}"
    for key in ("study", "kind", "cell", "point", "repeat", "attempt", "status", "failure")
)
RUN_TAGS = {
    NAME_TAG: "Name of the study, on all runs.",
    KIND_TAG: "study, cell, trial or repeat.",
    CELL_TAG: "The cell as `str(Cell)` has it, on runs of cells and below. What follows is on "
    "trials and repeats.",
    POINT_TAG: "The point.",
    REPEAT_TAG: "The number of the repeat, on runs of repeats.",
    ATTEMPT_TAG: "The attempt that the run shows: the number of its trial in Optuna. Earlier "
    "versions logged none.",
    STATUS_TAG: "The trial's `Status`.",
    FAILURE_TAG: "Why it failed or was stopped, in one line.",
}
# Metrics of a trial's run: steps_to_result, seconds, kept/TENSOR, theory/TERM, observed/COUNT, and
# by step val_error, train_loss, lipschitz, squared_gradient. Of a cell's: K_star, a count for each
# status, theory/TERM, and of its repeats K_median, repeats, missed. Of a study's: by batch size
# K_star/S_0.9 and K_median/S_0.9, and c1/S_0.9, c2/S_0.9, b_crit/S_0.9 of the fitted laws,
# noise_scale and noise_scale_low; of one that probes also advice/*: step_seconds by local batch,
# run_steps of what is recommended, critical_at_least by the step of a fork, and the answer.


def cell_study_name(name: str, cell: Cell) -> str:
    """Name of the Optuna study that holds a cell's trials."""
    return f"{name} | {cell}"


def repeats_study_name(name: str, cell: Cell) -> str:
    """Name of the Optuna study that holds the repeats of a cell."""
    return f"{cell_study_name(name, cell)} | repeats"


def cells_of(header: Mapping[str, Any]) -> list[Cell]:
    """All cells of the grid of a header: the product of its axes."""
    return grid(header["batch_sizes"], header["sparsities"], header.get(AXES))


def encode_result(result: TrialResult) -> dict:
    """What is stored of a result under `RESULT_ATTR`: plain JSON, without the trial itself.

    Curve values that are not finite become "nan", "inf" and "-inf": not every database's JSON can
    hold them.
    """
    return {
        "status": str(result.status),
        "steps": None if result.steps is None else int(result.steps),
        "curve": {key: [_encode(x) for x in values] for key, values in result.curve.items()},
        "kept": {key: [int(kept), int(total)] for key, (kept, total) in result.kept.items()},
        "seconds": float(result.seconds),
        "smoothness": {
            key: [_encode(x) for x in values] for key, values in result.smoothness.items()
        },
        "theory": {key: _encode(x) for key, x in result.theory.items()},
        "observed": {key: _encode(x) for key, x in result.flags.items()},
        **({"engine": result.engine} if result.engine else {}),
        **({"timed": {key: _encode(x) for key, x in result.timed.items()}} if result.timed else {}),
        **({"failure": result.failure, "traceback": result.traceback} if result.failure else {}),
    }


def _encode(x: float | int) -> float | int | str:
    return int(x) if isinstance(x, Integral) else float(x) if math.isfinite(x) else str(float(x))


def _decode_list(values: list[float | int | str]) -> list[float | int]:
    # Most curves have no strings, which stand for nan and infinite numbers.
    return list(map(_decode, values)) if str in set(map(type, values)) else list(values)


def _decode(x: float | int | str) -> float | int:
    return float(x) if isinstance(x, str) else x


def decode_result(
    stored: Mapping, trial: Trial, attempt: int | None = None, environment: str | None = None
) -> TrialResult:
    """The inverse of `encode_result`; `attempt` is the number of the Optuna trial that holds the
    result.

    `environment` is the key of the environment that the trial ran in.

    Raises:
        KeyError, TypeError, ValueError or AttributeError: for anything else.
    """
    return TrialResult(
        trial=trial,
        status=Status(stored["status"]),
        steps=stored["steps"],
        curve={key: _decode_list(values) for key, values in stored["curve"].items()},
        kept={key: (kept, total) for key, (kept, total) in stored["kept"].items()},
        seconds=stored["seconds"],
        smoothness={
            key: _decode_list(values) for key, values in stored.get("smoothness", {}).items()
        },
        theory={key: _decode(x) for key, x in stored.get("theory", {}).items()},
        flags={key: _decode(x) for key, x in stored.get("observed", {}).items()},
        failure=stored.get("failure", ""),
        traceback=stored.get("traceback", ""),
        attempt=attempt,
        timed={key: _decode(x) for key, x in stored.get("timed", {}).items()},
        engine=stored.get("engine", ""),
        environment=environment,
    )
