"""The schema: every stored key of a study with its type, unit and meaning, as plain tables.

Optuna's database holds all results. A study NAME consists of several Optuna studies:

    NAME                              the header: its user attributes declare the study
    NAME | B=16 S=0.9                 one cell: its trials are the attempts at the cell's points
    NAME | B=16 S=0.9 | repeats       repeats of the cell's best points on fresh seeds
    NAME (advice)                     what `advise` has measured; it has no trials

The header has one trial for each cell, whose value is K*. These trials are written at the end of a
study, for people who use Optuna's plots; lit_dps does not read them.

MLflow holds a copy, which `analyze --sync` makes again: one experiment for each workload, in it one
run for each study, below it one run for each cell, below that one run for each trial and repeat.

A line that begins with `# format 1:` marks what earlier versions stored, here and where it is read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from numbers import Integral
from typing import Any, NamedTuple

from optuna.trial import TrialState

from lit_dps.core.record import grid
from lit_dps.core.trial import Cell, Status, Trial, TrialResult

FORMAT = 1  # version of this schema


class Stored(NamedTuple):
    """One stored value.

    Attributes:
        type: Its JSON type, or the method that writes it.
        meaning: What it is.
        unit: Its unit; "" if it has none.
        absent: When the key is missing; "" if it is always there.
    """

    type: str
    meaning: str
    unit: str = ""
    absent: str = ""


# ---- User attributes of the header ----
MADE_BY, FORMAT_ATTR, UID = "made_by", "lit_dps_format", "uid"
IDENTITY, CONFIG, ABOUT = "identity", "config", "about"
WORKLOAD, GOAL, SEED, TRIAL_SEED, SPACE = "workload", "goal", "seed", "trial_seed", "space"
BATCH_SIZES, SPARSITIES, AXES, TRIALS = "batch_sizes", "sparsities", "axes", "trials"
GOALS, SLACK, RUN_ON, REPEATS, BOXES = "goals", "slack", "run_on", "repeats", "boxes"
NOISE, STEP_TIMING, ENVIRONMENTS = "noise_scale", "step_timing", "environments"
RUNS, REPORTED = "runs", "reported"
# A key in the identity: arguments of data of which nothing was read, so that they have no digest.
UNREAD = "unread_data"

# format 1: studies of earlier versions may lack made_by, uid, about, goals, slack, environments and
# runs.
HEADER_ATTRS = {
    MADE_BY: Stored("str", '"lit_dps". It is written first; studies of other programs lack it.'),
    FORMAT_ATTR: Stored("int", "`FORMAT`. It is written last; an incomplete header lacks it."),
    UID: Stored("str", "Random id. It differs from the id of a deleted study of the same name."),
    IDENTITY: Stored("dict", "All that decides results. It must not change when a study resumes."),
    CONFIG: Stored("dict", "The entire configuration of the command that made the study."),
    ABOUT: Stored("str", "Describes the study to people who see it in a list of Optuna studies."),
    WORKLOAD: Stored("str", "Name of the workload and of the MLflow experiment."),
    GOAL: Stored("Goal.to_dict", "When a trial is complete (`lit_dps.core.goal`)."),
    SEED: Stored("int", "The study's seed. The seeds of trials are derived from it."),
    TRIAL_SEED: Stored(
        "int", "The seeds of trials are derived from it instead.", absent="without study.best_of"
    ),
    SPACE: Stored("dict: key -> Range or Choices", "The search space at the study's start."),
    # The following keys can be extended, never reduced.
    BATCH_SIZES: Stored("list of int", "Batch sizes of the grid, sorted.", "examples"),
    SPARSITIES: Stored("list of float", "Sparsities of the grid, sorted.", "share of weights"),
    AXES: Stored("dict: key -> list", "Further axes of the grid.", absent="without further axes"),
    TRIALS: Stored("int", "Trials of each cell: points 0 to trials - 1."),
    GOALS: Stored("list of float", "Further values of the goal's metric, sorted."),
    SLACK: Stored("float or null", "Trials run to slack x K* of their cell; null: to max_steps."),
    RUN_ON: Stored("true", "Trials run to max_steps after the goal.", absent="if they do not"),
    REPEATS: Stored("RepeatPlan", "The largest plan of repeats so far.", absent="without repeats"),
    BOXES: Stored(
        "list of ExpandedSpace.to_dict", "Expansions of the space.", absent="without expansion"
    ),
    # The following keys record what the runs of the study have measured.
    NOISE: Stored("NoiseScale.to_dict", "Gradient noise scale.", "examples", "if not measured"),
    STEP_TIMING: Stored("StepTiming.to_dict", "Times of single steps.", "s", "if not measured"),
    ENVIRONMENTS: Stored("list of dict", "Code, data and versions of the trials, oldest first."),
    RUNS: Stored("int", "Number of the last `study` command that ran trials, from 1."),
    REPORTED: Stored("int", "Results in the analysis of the last run.", absent="before the first"),
}

# ---- User attributes of a cell ----
BATCH_SIZE, SPARSITY = "batch_size", "sparsity"
CELL_ATTRS = {
    BATCH_SIZE: Stored("int", "Global batch size.", "examples"),
    SPARSITY: Stored("float", "Share of pruned parameters."),
    AXES: Stored("dict: key -> value", "Values on further axes.", absent="without further axes"),
    UID: Stored("str", "Id of the study. Another id means that a deleted study left the cell."),
}

# ---- Trials of a cell: user attributes ----
# The parameters of a trial are its metaparameters by configuration key. The value of a complete
# trial is its steps to result. A trial's number identifies the attempt: a point may have several.
POINT_ATTR, REPEAT_ATTR, OWNER, ENVIRONMENT = "point", "repeat", "owner", "environment"
RESULT_ATTR, STATUS_ATTR = "result", "status"
FAILED_AT, FAILED_IN, MERGED_FROM = "failed_at", "failed_in", "merged_from"
# format 1: trials of earlier versions may lack environment, status and failed_in. Their owner is
# host:pid:start.
TRIAL_ATTRS = {
    POINT_ATTR: Stored("int", "Index into the Sobol sequence, or the order of another sampler."),
    REPEAT_ATTR: Stored("int", "Number of the repeat, from 1.", absent="except for repeats"),
    OWNER: Stored(
        "str",
        "Process that runs the trial: TOKEN@host:pid, where TOKEN is a file beside the storage; "
        "host:pid:SESSION on PostgreSQL.",
        absent="while the trial waits",
    ),
    ENVIRONMENT: Stored("str", "Key of its environment among those of the header."),
    RESULT_ATTR: Stored("dict", "`RESULT_KEYS`.", absent="if it was interrupted: it runs again"),
    STATUS_ATTR: Stored("str", "`Status`, for people, because Optuna has fewer states."),
    FAILED_AT: Stored("float", "Time of a failure, for people.", "s since 1970", "without one"),
    FAILED_IN: Stored(
        "int", "`RUNS` at a failure; later runs retry the point.", absent="without a failure"
    ),
    MERGED_FROM: Stored("str", "The storage that `merge` copied it from.", absent="if not copied"),
}

# ---- The result of a trial, under `RESULT_ATTR` ----
# Numbers that are not finite are stored as "nan", "inf" and "-inf", because not every database can
# store them as JSON. `lit_dps.core.trial.TrialResult` describes the keys within the dicts.
# format 1: results of earlier versions may lack smoothness, theory, observed, timed and engine, and
# have other names of engines.
FORMER_ENGINES = {"interval loop": "single", "stack": "stacked", "Lightning": "lightning"}
RESULT_KEYS = {
    "status": Stored("str", "`Status`: how the trial ended."),
    "steps": Stored("int or null", "Steps to result; null unless it is complete.", "steps"),
    "curve": Stored("dict: column -> list", "Step, metric and training loss of each validation."),
    "kept": Stored("dict: tensor -> [int, int]", "Kept and all elements of prunable tensors."),
    "seconds": Stored("float", "Wall time of the trial.", "s"),
    "smoothness": Stored("dict: column -> list", "Lipschitz constants by step."),
    "theory": Stored("dict: name -> float", "Terms of the convergence bound."),
    "observed": Stored("dict: name -> float", "Counts that readers of the table should know."),
    "engine": Stored("str", "The loop that trained it."),
    "engine_reason": Stored("str", "Why no faster loop trained it.", absent="without a reason"),
    "timed": Stored("dict: name -> float", "Counts and seconds of steps.", absent="if not timed"),
    "failure": Stored("str", "Why it failed or stopped, in one line.", absent="if it did not"),
    "traceback": Stored("str", "Traceback of the failure.", absent="if it did not fail"),
}

# ---- Trials of a cell: states and intermediate values ----
# A trial is WAITING from when its point is enqueued, and RUNNING from when a worker claims it.
# Its intermediate values are up to 32 values of the goal's metric by step, for Optuna's plots.
# Pruned trials have no value.
STATES = {
    Status.COMPLETE: TrialState.COMPLETE,
    Status.INCOMPLETE: TrialState.PRUNED,
    Status.OUTRACED: TrialState.PRUNED,
    Status.PAUSED: TrialState.PRUNED,
    Status.INFEASIBLE: TrialState.FAIL,
    Status.STOPPED: TrialState.FAIL,
    Status.FAILED: TrialState.FAIL,
}

# ---- Trials of the header: one for each cell ----
# The value is K*. The parameters are the cell's axes that are numbers. If a cell has several
# trials, the last one counts.
CELL_ATTR, BEST_POINT, BEST_ATTR = "cell", "best_point", "metaparameters"
OUTCOME_ATTRS = {
    CELL_ATTR: Stored("str", "The cell, as `str(Cell)`."),
    BEST_POINT: Stored("int", "The point whose trial needed K* steps."),
    BEST_ATTR: Stored("dict: key -> value", "Metaparameters of this point."),
}

# ---- User attributes of advice ----
ADVICE_SUFFIX = " (advice)"  # of the Optuna study's name; names of studies have no brackets
PROBES_SUFFIX = "-advice"  # of the name of the study that runs the probes
# format 1: advice of earlier versions may lack max_steps, environment, waited, branch_adaptive and
# branch_scaled.
ADVICE_ATTRS = {
    "configuration": Stored("dict", "The identity of the study that probes, without its trials."),
    "max_steps": Stored("int", "The proposed goal.max_steps.", "steps", "if the user set it"),
    "environment": Stored("dict", "Code and data of the first measurement."),
    "spent": Stored("float", "Time that all runs of the command have taken.", "s"),
    "timed": Stored("list of lists", "Timed steps: fields of `lit_dps.advice.step_time.Timed`."),
    "check": Stored("float", "Time of one validation.", "s"),
    "largest": Stored(
        "list", "Largest batch size of one device, why no larger one fits, whether memory is why."
    ),
    "waited": Stored("float", "Share of the timed steps that the process waited for a CPU."),
    "parameters": Stored("int", "Parameters of the network."),
    "noise": Stored("NoiseScale.to_dict", "Gradient noise scale.", "examples"),
    "confirmed": Stored(
        "list of dict", "Runs of recommended batch sizes: batch_size, params, steps, seconds, ..."
    ),
    "branches": Stored("list of Fork.stored", "Forks of the branch method."),
    "branch_adaptive": Stored("bool", "Whether branches scale the rate as for Adam."),
    "branch_scaled": Stored("bool", "Whether branches scale second moment and weight decay."),
    "branch_steps": Stored("int", "Steps to the goal of the run that was forked.", "steps"),
    "outcomes": Stored("list of dict", "Predicted and real steps and hours of runs of `fit`."),
}

# ---- Tags of MLflow runs ----
NAME_TAG, KIND_TAG, CELL_TAG = "lit_dps.study", "lit_dps.kind", "lit_dps.cell"
POINT_TAG, REPEAT_TAG, ATTEMPT_TAG = "lit_dps.point", "lit_dps.repeat", "lit_dps.attempt"
STATUS_TAG, FAILURE_TAG = "lit_dps.status", "lit_dps.failure"
# format 1: runs that earlier versions logged may lack the attempt.
RUN_TAGS = {
    NAME_TAG: Stored("str", "Name of the study."),
    KIND_TAG: Stored("str", "study, cell, trial or repeat."),
    CELL_TAG: Stored("str", "The cell, as `str(Cell)`.", absent="on runs of studies"),
    # The following tags are on the runs of trials and repeats only.
    POINT_TAG: Stored("int", "The point."),
    REPEAT_TAG: Stored("int", "The number of the repeat.", absent="except for repeats"),
    ATTEMPT_TAG: Stored("int", "The number of the Optuna trial that the run shows."),
    STATUS_TAG: Stored("str", "The trial's `Status`."),
    FAILURE_TAG: Stored("str", "Why it failed or stopped, in one line.", absent="if it did not"),
}

# ---- Metrics of MLflow runs, by the kind of the run ----
RUN_METRICS = {
    "trial": "steps_to_result, seconds, kept/TENSOR, theory/TERM, observed/COUNT; by step: the "
    "goal's metric, train_loss, lipschitz, squared_gradient",
    "cell": "K_star, the number of trials of each status, theory/TERM; of repeats: K_median, "
    "repeats, missed",
    "study": "noise_scale, noise_scale_low, and c1/S_0.9, c2/S_0.9, b_crit/S_0.9 of each fitted "
    "law; by batch size: K_star/S_0.9, K_median/S_0.9",
    "study of advise": "advice/*: step_seconds by local batch size, run_steps of what is "
    "recommended, critical_at_least by the step of a fork, and the answer",
}


def cell_study_name(name: str, cell: Cell) -> str:
    """Return the name of the Optuna study that holds a cell's trials."""
    return f"{name} | {cell}"


def repeats_study_name(name: str, cell: Cell) -> str:
    """Return the name of the Optuna study that holds the repeats of a cell."""
    return f"{cell_study_name(name, cell)} | repeats"


def cells_of(header: Mapping[str, Any]) -> list[Cell]:
    """Return all cells of the grid of a header, the product of its axes."""
    return grid(header[BATCH_SIZES], header[SPARSITIES], header.get(AXES))


def encode_result(result: TrialResult) -> dict[str, Any]:
    """Return a result as plain JSON with the keys of `RESULT_KEYS`, without the trial itself."""
    stored: dict[str, Any] = {
        "status": str(result.status),
        "steps": None if result.steps is None else int(result.steps),
        "curve": _encode_columns(result.curve),
        "kept": {name: [int(kept), int(total)] for name, (kept, total) in result.kept.items()},
        "seconds": float(result.seconds),
        "smoothness": _encode_columns(result.smoothness),
        "theory": _encode_values(result.theory),
        "observed": _encode_values(result.flags),
    }
    if result.engine:
        stored["engine"] = result.engine
    if result.engine_reason:
        stored["engine_reason"] = result.engine_reason
    if result.timed:
        stored["timed"] = _encode_values(result.timed)
    if result.failure:
        stored["failure"] = result.failure
        stored["traceback"] = result.traceback
    return stored


def decode_result(
    stored: Mapping[str, Any],
    trial: Trial,
    attempt: int | None = None,
    environment: str | None = None,
) -> TrialResult:
    """Return the result that `encode_result` has encoded.

    Args:
        stored: The encoded result.
        trial: The trial.
        attempt: Number of the Optuna trial that holds the result.
        environment: Key of the environment that the trial ran in.

    Raises:
        KeyError, TypeError, ValueError or AttributeError: if `stored` is no encoded result.
    """
    return TrialResult(
        trial=trial,
        status=Status(stored["status"]),
        steps=stored["steps"],
        curve=_decode_columns(stored["curve"]),
        kept={name: (kept, total) for name, (kept, total) in stored["kept"].items()},
        seconds=stored["seconds"],
        # format 1: the following keys may be missing.
        smoothness=_decode_columns(stored.get("smoothness", {})),
        theory=_decode_values(stored.get("theory", {})),
        flags=_decode_values(stored.get("observed", {})),
        failure=stored.get("failure", ""),
        traceback=stored.get("traceback", ""),
        attempt=attempt,
        timed=_decode_values(stored.get("timed", {})),
        engine=_engine_of(stored),
        engine_reason=stored.get("engine_reason", ""),
        environment=environment,
    )


def _engine_of(stored: Mapping[str, Any]) -> str:
    """Return the loop of an encoded result by its present name; empty if it is not stored."""
    engine: str = stored.get("engine") or ""
    return FORMER_ENGINES.get(engine, engine)


def _encode_columns(columns: Mapping[str, Iterable[float]]) -> dict[str, list[float | str]]:
    encoded = {}
    for name, values in columns.items():
        encoded[name] = [_encode(value) for value in values]
    return encoded


def _encode_values(values: Mapping[str, float]) -> dict[str, float | str]:
    return {name: _encode(value) for name, value in values.items()}


def _encode(value: float) -> float | str:
    if isinstance(value, Integral):
        return int(value)
    if math.isfinite(value):
        return float(value)
    return str(float(value))


def _decode_columns(columns: Mapping[str, list[float | str]]) -> dict[str, list[float]]:
    decoded = {}
    for name, values in columns.items():
        # Most columns hold no text; they are copied, because a large study has millions of values.
        if str in set(map(type, values)):
            decoded[name] = [_decode(value) for value in values]
        else:
            decoded[name] = list(values)
    return decoded


def _decode_values(values: Mapping[str, float | str]) -> dict[str, float]:
    return {name: _decode(value) for name, value in values.items()}


def _decode(value: float | str) -> float:
    return float(value) if isinstance(value, str) else value
