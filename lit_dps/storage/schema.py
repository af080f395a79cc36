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

Every stored object has all keys of its table, unless `Stored.absent` says when a key is missing.
`lit_dps.storage.migrate` and `format_1` convert studies of format 1. All other code reads format 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import UnionType
from typing import Any, NamedTuple

from optuna.trial import TrialState

from lit_dps.core.record import grid
from lit_dps.core.statistic import MINIMUM, Statistic, statistic_named
from lit_dps.core.text import shorten
from lit_dps.core.trial import LIPSCHITZ, THEORY, Cell, Status, Trial, TrialResult
from lit_dps.core.unit import STEPS, Cost, Unit, unit_named
from lit_dps.storage.columns import decode_columns, decode_values, encode_columns, encode_values

FORMAT = 2  # version of this schema

NUMBER = int | float


class Stored(NamedTuple):
    """One stored value.

    Attributes:
        type: The type of its JSON value.
        meaning: What it is, and its unit.
        absent: When the key is missing; "" if it is always there.
    """

    type: type | UnionType
    meaning: str
    absent: str = ""


# ---- User attributes of the header ----
MADE_BY = "made_by"
FORMAT_ATTR = "lit_dps_format"
UID = "uid"
IDENTITY = "identity"
CONFIG = "config"
ABOUT = "about"
WORKLOAD = "workload"
GOAL = "goal"
SEED = "seed"
TRIAL_SEED = "trial_seed"
SPACE = "space"
BATCH_SIZES = "batch_sizes"
SPARSITIES = "sparsities"
AXES = "axes"
TRIALS = "trials"
GOALS = "goals"
RACE_FACTOR = "race_factor"
TRAIN_PAST_GOAL = "train_past_goal"
STATISTIC = "statistic"
REPEATS = "repeats"
SPACE_HISTORY = "space_history"
NOISE = "noise_scale"
STEP_TIMING = "step_timing"
ENVIRONMENTS = "environments"
RUNS = "runs"
REPORTED = "reported"
NOTES = "notes"
# A key in the identity: arguments of data of which nothing was read, so that they have no digest.
UNREAD = "unread_data"

HEADER_ATTRS = {
    MADE_BY: Stored(str, '"lit_dps". Studies of other programs lack it.'),
    FORMAT_ATTR: Stored(int, "`FORMAT`. A header that an earlier version wrote in part lacks it."),
    UID: Stored(str, "Random id. It differs from the id of a deleted study of the same name."),
    IDENTITY: Stored(dict, "All that decides results. It must not change when a study resumes."),
    CONFIG: Stored(dict, "The entire configuration of the command that made the study."),
    ABOUT: Stored(str, "Describes the study to people who see it in a list of Optuna studies."),
    WORKLOAD: Stored(str, "Name of the workload and of the MLflow experiment."),
    GOAL: Stored(dict, "When a trial is complete: the fields of `lit_dps.core.goal.Goal`."),
    SEED: Stored(int, "The study's seed. It decides the points."),
    TRIAL_SEED: Stored(
        int, "The seeds of trials are derived from it. With study.best_of it is not the seed."
    ),
    SPACE: Stored(dict, "The search space at the study's start: Range or Choices by key."),
    # The following keys can be extended, never reduced.
    BATCH_SIZES: Stored(list, "Batch sizes of the grid in examples, sorted."),
    SPARSITIES: Stored(list, "Sparsities of the grid, sorted: shares of the weights."),
    AXES: Stored(dict, "Values on each further axis of the grid, by key."),
    TRIALS: Stored(int, "Trials of each cell: points 0 to trials - 1."),
    GOALS: Stored(list, "Further values of the goal's metric, sorted."),
    RACE_FACTOR: Stored(
        NUMBER | None, "Trials run to this multiple of K* of their cell; null: to their budget."
    ),
    TRAIN_PAST_GOAL: Stored(bool, "Whether trials run to their budget after the goal."),
    STATISTIC: Stored(str, "What K* is, as study.statistic.", absent="if it is the minimum"),
    REPEATS: Stored(dict, "`REPEAT_KEYS`: the largest plan of repeats so far."),
    SPACE_HISTORY: Stored(list, "Expansions of the space, as `ExpandedSpace.to_dict`."),
    # The following keys record what the runs of the study have measured.
    NOISE: Stored(dict | None, "`NoiseScale.to_dict`, in examples; null if not measured."),
    STEP_TIMING: Stored(dict | None, "`StepTiming.to_dict`, in s; null if not measured."),
    ENVIRONMENTS: Stored(list, "Code, data and versions of the trials, oldest first."),
    RUNS: Stored(int, "Number of the last `study` command that ran trials, from 1; 0: none."),
    REPORTED: Stored(int | None, "Results in the analysis of the last run; null: no analysis."),
    NOTES: Stored(
        dict,
        "Notes of dry runs that weaken a number: the name of the `lit_dps.report.notes.Level` by "
        "text.",
        absent="without one; before 2026-11-30",
    ),
}
# Values of the keys that the first run of a study has not set yet.
UNMEASURED: dict[str, Any] = {
    NOISE: None,
    STEP_TIMING: None,
    ENVIRONMENTS: [],
    RUNS: 0,
    REPORTED: None,
}
REPEAT_KEYS = {
    "count": Stored(int, "Repeats of each point; 0 for none."),
    "points": Stored(int, "How many of a cell's best points are repeated."),
    RACE_FACTOR: Stored(
        NUMBER | None, "Repeats run to this multiple of K*; null: to their budget."
    ),
}

# ---- User attributes of a cell ----
BATCH_SIZE, SPARSITY = "batch_size", "sparsity"
CELL_ATTRS = {
    BATCH_SIZE: Stored(int, "Global batch size, in examples."),
    SPARSITY: Stored(NUMBER, "Share of pruned parameters."),
    AXES: Stored(dict, "Values on further axes, by key."),
    UID: Stored(str, "Id of the study. Another id means that a deleted study left the cell."),
}

# ---- Trials of a cell: user attributes ----
# The parameters of a trial are its metaparameters by configuration key. The value of a complete
# trial is its steps to result. A trial's number identifies the attempt: a point may have several.
POINT_ATTR = "point"
REPEAT_ATTR = "repeat"
OWNER = "owner"
ENVIRONMENT = "environment"
RESULT_ATTR = "result"
STATUS_ATTR = "status"
MERGED_FROM = "merged_from"
TRIAL_ATTRS = {
    POINT_ATTR: Stored(int, "Index into the Sobol sequence, or the order of another sampler."),
    REPEAT_ATTR: Stored(int, "0 for a trial of the search; its repeats count from 1."),
    OWNER: Stored(
        str,
        "Process that runs the trial: TOKEN@host:pid, where TOKEN is a file beside the storage; "
        "host:pid:SESSION on PostgreSQL.",
        absent="while the trial waits",
    ),
    ENVIRONMENT: Stored(
        str | None,
        "Key of its environment among those of the header; null if it was not recorded.",
        absent="while the trial waits",
    ),
    RESULT_ATTR: Stored(dict, "`RESULT_KEYS`.", absent="without a result: the point runs again"),
    STATUS_ATTR: Stored(
        str, "`Status`, for people: Optuna has fewer states.", absent="without a result"
    ),
    MERGED_FROM: Stored(str, "The storage that `merge` copied it from.", absent="if not copied"),
}

# ---- The result of a trial, under `RESULT_ATTR` ----
# Numbers that are not finite are stored as "nan", "inf" and "-inf", because not every database can
# store them as JSON. `lit_dps.core.trial.TrialResult` describes the keys within the dicts.
# `lit_dps.storage.columns` describes how a column is encoded.
FAILED_AT, FAILED_IN = "failed_at", "failed_in"
FORMER = "except in results of earlier versions"
RESULT_KEYS = {
    "status": Stored(str, "`Status`: how the trial ended."),
    "steps": Stored(int | None, "Steps to result; null unless it is complete."),
    "curve": Stored(dict, "Encoded columns: step, metric and training loss of each validation."),
    "kept": Stored(dict, "[kept, all] elements of each prunable tensor."),
    "seconds": Stored(NUMBER, "Wall time of the trial, in s."),
    "smoothness": Stored(dict, "Columns of the reading `LIPSCHITZ`.", absent=FORMER),
    "theory": Stored(dict, "Flags of `THEORY`.", absent=FORMER),
    "readings": Stored(
        dict, "Encoded columns by name of a reading.", absent="without readings along the run"
    ),
    "end_readings": Stored(dict, "Readings at the end, by column.", absent="without one"),
    "flags": Stored(dict, "Counts that readers of the table should know."),
    "unit": Stored(str, "`goal.unit` of the study.", absent="if it is steps"),
    "engine": Stored(str, 'The loop that trained it; "" if it failed or is not recorded.'),
    "engine_reason": Stored(str, 'Why this loop trained it; "" if it is not recorded.'),
    "timed": Stored(
        dict, "Counts and seconds of steps and validations; empty if they were not timed."
    ),
    "failure": Stored(str, 'Why it failed or stopped, in one line; "" if it did not.'),
    "traceback": Stored(str, 'Traceback of the failure; "" if it did not fail.'),
    FAILED_AT: Stored(NUMBER | None, "Time of the failure in s since 1970; null without one."),
    FAILED_IN: Stored(
        int, "`RUNS` at the failure; later runs retry the point. 0 without a failure."
    ),
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
CELL_ATTR = "cell"
BEST_POINT = "best_point"
BEST_ATTR = "metaparameters"
OUTCOME_ATTRS = {
    CELL_ATTR: Stored(str, "The cell, as `Cell.stored_name`."),
    BEST_POINT: Stored(int, "The point whose trial needed K* steps."),
    BEST_ATTR: Stored(dict, "Metaparameters of this point, by key."),
}

# ---- User attributes of advice ----
# Each key is stored as soon as `advise` has measured it, so all but the first two may be missing.
ADVICE_SUFFIX = " (advice)"  # of the Optuna study's name; names of studies have no brackets
PROBES_SUFFIX = "-advice"  # of the name of the study that runs the probes
ADVICE_FORMAT = "advice_format"
ADVICE_ATTRS = {
    MADE_BY: Stored(str, '"lit_dps".'),
    ADVICE_FORMAT: Stored(int, "`FORMAT`."),
    "configuration": Stored(dict, "The identity of the study that probes, without its trials."),
    "max_steps": Stored(int, "The proposed goal.max_steps.", absent="if the user set it"),
    "environment": Stored(dict, "Code and data of the first measurement."),
    "weaknesses": Stored(
        dict, "Like notes in `HEADER_ATTRS`, of the last dry run.", absent="before 2026-12-01"
    ),
    "budget": Stored(NUMBER, "The budget of the last command, in s.", absent="without a budget"),
    "spent": Stored(NUMBER, "Time that all runs of the command have taken, in s."),
    "announced": Stored(
        NUMBER,
        "The most time of all runs, in s, as the first command announced it last.",
        absent="before 2026-11-29; for a method other than pilot",
    ),
    "timed": Stored(list, "Timed steps: fields of `lit_dps.advice.step_time.Timed`."),
    "timed_on": Stored(
        str, "Hardware, accelerator and ranks of the timed steps.", absent="before 2026-12-01"
    ),
    "check": Stored(NUMBER, "Time of one validation at any batch size, in s."),
    "check_by_batch": Stored(
        NUMBER,
        "Further time of a validation, times the local batch, in s * examples.",
        absent="before 2026-11-29",
    ),
    "largest": Stored(
        list, "Largest batch size of one device, why no larger one fits, whether memory is why."
    ),
    "waited": Stored(NUMBER, "Share of the timed steps that the process waited for a CPU."),
    "slowdown": Stored(
        NUMBER,
        "Timed steps over steps without the wait for a CPU; part of `timed`.",
        absent="before 2026-12-01",
    ),
    "start_of_ranks": Stored(
        NUMBER, "Time that the ranks of a run take to start, in s.", absent="before 2026-11-29"
    ),
    "parameters": Stored(int, "Parameters of the network."),
    "depends_on_batch": Stored(
        list, "What of the loss depends on the batch: loss, weights, norm, unknown."
    ),
    "reads_noise": Stored(bool, "Whether the noise scale can be read along the user's run."),
    "pilot": Stored(dict, "The user's run: `lit_dps.advice.pilot_evidence.PilotRun`."),
    "tried": Stored(
        list, "Runs after the pilot: batch size, rate over the rule's, rank, steps or metric."
    ),
    "untested_rate": Stored(
        list,
        "small or large, as the user's rate may be, and the rate that was not run at B0 for lack "
        "of time.",
        absent="before 2026-12-01, and if there was none; empty once it was run",
    ),
    "raced": Stored(list, "Batch sizes at which all runs have ended."),
    "bounds": Stored(list, "Batch sizes at which no run met the goal, and the steps until then."),
    "branches": Stored(list, "Forks of the branch method, as `Fork.to_dict`."),
    "branch_adaptive": Stored(bool, "Whether branches scale the rate as for Adam."),
    "branch_scaled": Stored(bool, "Whether branches scale second moment and weight decay."),
    "branch_factors": Stored(
        list, "Batch sizes of the branches over B0.", absent="before 2026-11-29"
    ),
    "branch_steps": Stored(int, "Steps to the goal of the run that was forked."),
    "branch_ended": Stored(
        bool, "Whether that run met its goal, or ended without it.", absent="before 2026-11-29"
    ),
    "outcomes": Stored(list, "Predicted and real steps and hours of runs of `fit`."),
}

# ---- Tags of MLflow runs ----
NAME_TAG = "lit_dps.study"  # name of the study
KIND_TAG = "lit_dps.kind"  # study, cell, trial or repeat
CELL_TAG = "lit_dps.cell"  # the cell, as `Cell.stored_name`; absent on runs of studies
SPACE_TAG = "lit_dps.space"  # the search space, as expanded last; on runs of studies only
# The following tags are on the runs of trials and repeats only.
POINT_TAG = "lit_dps.point"  # an integer, the place of the trial in the search
REPEAT_TAG = "lit_dps.repeat"  # an integer, the number of the repeat; absent except for repeats
ATTEMPT_TAG = "lit_dps.attempt"  # an integer, the number of the Optuna trial that the run shows
STATUS_TAG = "lit_dps.status"  # the trial's `Status`
FAILURE_TAG = "lit_dps.failure"  # why it failed or stopped, in one line; absent if it did not

# ---- Metrics of MLflow runs, by the kind of the run ----
# trial: steps_to_result, seconds, kept/TENSOR, theory/TERM, observed/COUNT, readings of the end by
#   column; by step: the goal's metric, train_loss, readings by column, examples, and curve/seconds,
#   the training time so far
# cell: K_star, the number of trials of each status, theory/TERM; of repeats: K_median, repeats,
#   missed; 1 for upper bounds: K_star_upper_bound, K_median_upper_bound, to_goal_upper_bound (of
#   seconds_to_goal, total_seconds_to_goal and examples_to_goal)
# study: noise_scale, noise_scale_low, noise_scale_readings, and c1/S_0.9, c2/S_0.9, b_crit/S_0.9 of
#   each law that describes K*; by batch size, without upper bounds: K_star/S_0.9, K_median/S_0.9
# study of advise: advice/*: step_seconds by local batch size, run_steps of what is recommended,
#   critical_at_least by the step of a fork, and the answer


def cell_study_name(name: str, cell: Cell) -> str:
    """Return the name of the Optuna study that holds a cell's trials."""
    return f"{name} | {cell.stored_name}"


def repeats_study_name(name: str, cell: Cell) -> str:
    """Return the name of the Optuna study that holds the repeats of a cell."""
    return f"{cell_study_name(name, cell)} | repeats"


def cells_of(header: Mapping[str, Any]) -> list[Cell]:
    """Return all cells of the grid of a header, the product of its axes."""
    return grid(header[BATCH_SIZES], header[SPARSITIES], header[AXES])


def statistic_of(header: Mapping[str, Any]) -> Statistic:
    """Return the statistic that K* of a stored study is."""
    return statistic_named(header.get(STATISTIC, MINIMUM.name))


def check_keys(values: Mapping[str, Any], definitions: Mapping[str, Stored]) -> None:
    """Check that stored values have all keys of their table, and values of the right types.

    Raises:
        ValueError: naming the first key that is missing or wrong.
    """
    for key, stored in definitions.items():
        if key in values:
            if not isinstance(values[key], stored.type):
                raise ValueError(f"{key!r} is {shorten(repr(values[key]))}")
        elif not stored.absent:
            raise ValueError(f"{key!r} is missing")


# ---- Results ----


def encode_result(
    result: TrialResult, failed_at: float | None = None, failed_in: int = 0
) -> dict[str, Any]:
    """Return a result as plain JSON with the keys of `RESULT_KEYS`, without the trial itself.

    Args:
        result: The result.
        failed_at: Time of a failure, in s since 1970.
        failed_in: The number of the study's run that failed.
    """
    steps = result.steps
    if steps is not None:
        steps = int(steps)  # NumPy's integers are no JSON
    readings = {}
    if result.readings:
        columns = {name: encode_columns(read) for name, read in result.readings.items()}
        readings["readings"] = columns
    if result.end_readings:
        readings["end_readings"] = encode_values(result.end_readings)
    unit = {}
    if result.unit is not STEPS:
        unit["unit"] = result.unit.name
    return {
        "status": str(result.status),
        "steps": steps,
        "curve": encode_columns(result.curve),
        "kept": {name: [int(kept), int(total)] for name, (kept, total) in result.kept.items()},
        "seconds": float(result.seconds),
        **readings,
        "flags": encode_values(result.flags),
        **unit,
        "engine": result.engine,
        "engine_reason": result.engine_reason,
        "timed": encode_values(result.timed),
        "failure": result.failure,
        "traceback": result.traceback,
        FAILED_AT: failed_at,
        FAILED_IN: failed_in,
    }


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
    readings = {name: decode_columns(read) for name, read in stored.get("readings", {}).items()}
    flags = decode_values(stored["flags"])
    # Results of the first version have two keys of their own for one reading.
    lipschitz = decode_columns(stored.get("smoothness", {}))
    if lipschitz.get("step"):
        readings[LIPSCHITZ] = lipschitz
    for name, value in decode_values(stored.get("theory", {})).items():
        flags[f"{THEORY}{name}"] = value
    return TrialResult(
        trial=trial,
        status=Status(stored["status"]),
        steps=stored["steps"],
        curve=decode_columns(stored["curve"]),
        kept={name: (kept, total) for name, (kept, total) in stored["kept"].items()},
        seconds=stored["seconds"],
        readings=readings,
        end_readings=decode_values(stored.get("end_readings", {})),
        flags=flags,
        failure=stored["failure"],
        traceback=stored["traceback"],
        attempt=attempt,
        timed=decode_values(stored["timed"]),
        engine=stored["engine"],
        engine_reason=stored["engine_reason"],
        environment=environment,
        unit=stored_unit(stored),
    )


def stored_unit(stored: Mapping[str, Any]) -> Unit:
    """Return the unit of the cost of an encoded result."""
    return unit_named(stored.get("unit", STEPS.name))


def stored_cost(stored: Mapping[str, Any]) -> Cost | None:
    """Return the cost of an encoded result; None unless it is complete."""
    unit = stored_unit(stored)
    if stored["steps"] is None or unit is STEPS:
        return stored["steps"]
    return unit.cost_at(decode_columns(stored["curve"]), stored["steps"])
