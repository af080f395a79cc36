"""The JSON document that `--json` prints: one definition for study, analyze, advise and fit."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lit_dps import __version__
from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.answer import K_STAR, MEDIAN, fastest_of, is_upper_bound
from lit_dps.analysis.intervals import Interval
from lit_dps.analysis.law import Law
from lit_dps.analysis.law_verdict import Trust
from lit_dps.analysis.step_seconds import QUIET
from lit_dps.analysis.summary import CellSummary, can_move
from lit_dps.analysis.tables import Row
from lit_dps.core.attempt import Attempt
from lit_dps.core.step_timing import StepTiming
from lit_dps.core.trial import FINAL_STATUSES, Series

SCHEMA = 2
# Values of `Document.status`.
ANSWERED = "answered"
NO_RESULT = "no result"
UNFINISHED = "unfinished"
# Values of `LawEntry.refused`.
REFUSED = {
    Trust.B_CRIT: "nothing",
    Trust.PREDICTED: "critical",
    Trust.INTERPOLATED: "extrapolation",
    Trust.MEASURED: "prediction",
}

Limits = dict[str, "float | None"]


@dataclass(kw_only=True)
class CellEntry:
    """One batch size of one series, in `Document.cells`.

    A value with limits is an object with `value`, `low` and `high`, the 95 % limits. What a command
    does not know is null, {} or []. In `advise` an entry also has `hours`, `device_hours` and
    `cost` with limits, `hours_mean`, `near_probability` (of a time within 10 % of the least) and
    `step_known`.

    Attributes:
        batch_size: Examples of an optimizer step, over all devices.
        sparsity: Share of weights that are pruned.
        axes: Values of further axes of the grid, by configuration key.
        devices: Number of devices; null in a study.
        k_star: The measured K* in `Document.unit`, with limits. In `advise`, the measured steps; in
            `fit`, null, because one run is no minimum over trials.
        bound: What `k_star` is: `exact`, `at most` or `at least`. In `fit`, what `steps` is.
        steps: Steps to the goal, with limits: by the law where it describes K*, else measured.
        steps_known: Where `steps` is from: `law`, `measured`, `extrapolated`, `prior`,
            `interpolated`, `branched` or `refused`.
        examples: Training examples to the goal. In `fit`, null if the size of a batch is unknown.
        step_seconds: Seconds of an optimizer step: the median over trials; in `fit`, the mean.
        step_seconds_quartiles: Its quartiles.
        timing: Where `seconds` of a study are from: `after the study` (timed alone), `trials`
            (beside other workers), `trials with checks` (the same, with validations) or `runs to
            the goal` (their own clock).
        seconds: Seconds of training to the goal, with limits. Validations are not counted; in
            `advise`, they are, unless `assumed` says that times exclude them.
        validation_seconds: Seconds of all validations to the goal, one every N steps of
            `--validate-every N`; null without this option.
        total_seconds: Seconds to the goal that `marks` and `recommendation` compare, with limits:
            `seconds` plus `validation_seconds`. Equal to `seconds` without `--validate-every`, and
            in a series of which no validation was timed. Null if validations of other cells of the
            series were timed, and not of this cell.
        metaparameters: Values of the trial of K*, by configuration key.
        trial: The number of that trial in its cell.
        trials: Numbers of trials: complete (met the goal), incomplete (missed it), infeasible
            (diverged), outraced (stopped early), stopped, failed, pending.
        range_edges: Metaparameters at an end of their range: `low` or `high`. They include ends
            that `--extend-space` cannot move, such as momentum 0.
        marks: Of `fastest` (least `total_seconds` of its series; in `advise` least `hours_mean`),
            `tied` (may be the fastest), `near` (within 10 % of the fastest), `fewest_examples`,
            `upper_bound` (`steps`, `examples` and all seconds to the goal are upper bounds),
            `busy_machine` (`step_seconds` varied), `range_edge` (a metaparameter is at an end that
            `--extend-space` can move), `pending`; in `advise` also `allowed` and `pareto`.
    """

    batch_size: float | None
    sparsity: float | None = None
    axes: Mapping[str, Any] = field(default_factory=dict)
    devices: int | None = None
    k_star: Limits | None = None
    bound: str | None = None
    steps: Limits | None = None
    steps_known: str | None = None
    examples: float | None = None
    step_seconds: float | None = None
    step_seconds_quartiles: Sequence[float] | None = None
    timing: str | None = None
    seconds: Limits | None = None
    validation_seconds: float | None = None
    total_seconds: Limits | None = None
    metaparameters: Mapping[str, Any] = field(default_factory=dict)
    trial: int | None = None
    trials: Mapping[str, int] = field(default_factory=dict)
    range_edges: Mapping[str, str] = field(default_factory=dict)
    marks: Sequence[str] = ()


@dataclass(kw_only=True)
class LawEntry:
    """The law of one series, in `Document.laws`.

    A study with repeats has two laws for each series, which differ in `statistic`.

    Attributes:
        sparsity, axes: The series, as in `CellEntry`.
        kind: `c1 / B + c2`; `branches` for `advise --method branch`.
        statistic: What the law describes, such as `K*` or `the median K over seeds`.
        batch_sizes: Batch sizes that it is fitted to.
        c1: c1 in examples, with limits; null without a fit.
        c2: c2 in steps, with limits; null without a fit.
        critical_batch_size: B_crit = c1 / c2 in examples, with limits; null if it is refused.
        critical_batch_size_above: What B_crit exceeds, if the data show only this.
        refused: `nothing`, `critical` (B_crit is not identifiable), `extrapolation` (the law does
            not describe K*) or `prediction` (too few K*). Each also refuses what precedes it.
        reason: Why; empty if nothing is refused.
        text: The law in one line.
    """

    sparsity: float | None = None
    axes: Mapping[str, Any] = field(default_factory=dict)
    kind: str = "c1 / B + c2"
    statistic: str | None = None
    batch_sizes: Sequence[float] = ()
    c1: Limits | None = None
    c2: Limits | None = None
    critical_batch_size: Limits | None = None
    critical_batch_size_above: float | None = None
    refused: str | None = None
    reason: str = ""
    text: str = ""


@dataclass(kw_only=True)
class Document:
    """The JSON object of `lit-dps study`, `analyze`, `advise` and `fit` with `--json`.

    stdout has this object alone; progress and texts go to stderr. It is strict JSON: a number that
    is not finite is null, and `not_finite` has its place. An object is printed only if there is
    something to report; check that stdout is not empty. It is empty after an error, and after an
    interruption that came before any result. New fields may be added. A changed meaning increases
    `schema`.

    Attributes:
        schema: The version of this object.
        lit_dps: The version of the package.
        source: `study`, `fit`, `measured` (`advise` with runs of the command) or `runs` (`advise`
            with runs that existed).
        status: `answered` (at least one K*, a recommendation, or the goal is met; trials may be
            pending), `unfinished` (no K* yet, and trials are pending) or `no result` (no trial is
            pending; failed trials run again when the study resumes).
        name: Name of the study, or of the file of runs.
        goal: The goal as text; null if it is unknown. Results at further goals (`study.goals`) are
            not in this object; `Study.at_goal(error).to_dict()` returns them.
        unit: The unit of `k_star`.
        cells: One object per cell (`CellEntry`).
        laws: The law of each series (`LawEntry`); with repeats also the law of medians.
        recommendation: The entry of `cells` to run: in a study, the least `total_seconds`, if
            validations were timed only of cells with `validation_seconds`; in `advise` with
            `learning_rate`. Null without step times.
        notes: What to know before you trust the numbers, a sentence each.
        report: Path of the report page; null without one.
        not_finite: Values that are null because they are not finite: `Infinity`, `-Infinity` or
            `NaN` by their place, such as `laws[0].critical_batch_size.high`.
        further: Fields of one command, at the top level of the object. A study has `workload`,
            `statistic` (what K* is, as study.statistic), `pending` (trials without a result),
            `hardware` (machines of the trials), `step_timing` (machine, date, threads and ranks of
            a timing after the study; null if `step_seconds` are not from it) and `noise_scale`.
            `advise` has `near_best` (the ends of the batch sizes within 10 % of the least mean
            time, and their devices), `measured` (`steps` is K; the law is fitted to
            `expected_steps`, which are more where K is the least of several rates; `log_error` is
            the standard error of their log, null if unknown), `next_run` and `assumed` (with the
            notes of the law and the law of rates). `fit` has `outcome`, `last_value` (of the metric
            of the goal; null without a validation, and if the last one stopped early) and
            `checkpoint`.
    """

    source: str
    status: str
    name: str | None
    goal: str | None
    unit: str = "steps"
    cells: Sequence[Mapping[str, Any]] = ()
    laws: Sequence[LawEntry] = ()
    recommendation: Mapping[str, Any] | None = None
    notes: Sequence[str] = ()
    report: str | None = None
    schema: int = SCHEMA
    lit_dps: str = __version__
    not_finite: dict[str, str] = field(default_factory=dict)
    further: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the object as plain values that strict JSON can hold."""
        content: dict[str, Any] = {"schema": self.schema, "lit_dps": self.lit_dps}
        for each in dataclasses.fields(self):
            if each.name not in ("further", "not_finite"):
                content[each.name] = getattr(self, each.name)
        content["laws"] = [dataclasses.asdict(law) for law in self.laws]
        content |= self.further
        not_finite = dict(self.not_finite)
        plain = {key: _plain(value, key, not_finite) for key, value in content.items()}
        return {**plain, "not_finite": not_finite}


def to_json(document: Mapping[str, Any]) -> str:
    """Return a document as strict JSON."""
    return json.dumps(document, indent=2, allow_nan=False)


def limits(value: float | None, low: float | None = None, high: float | None = None) -> Limits:
    """Return a value with its 95 % limits, null where they are unknown."""
    return {"value": value, "low": low, "high": high}


def limits_of(value: float, interval: Interval | None) -> Limits:
    """Return a value with an interval; null limits without one."""
    if interval is None:
        return limits(value)
    return limits(value, interval.low, interval.high)


def study_document(study: Analysis, notes: Sequence[str], report: str | None = None) -> Document:
    """Return the document of a study.

    Args:
        study: The study, finished or not.
        notes: What to know before trusting it.
        report: Path of its report page.
    """
    record = study.record
    cells = [dataclasses.asdict(cell_entry(study, summary)) for summary in study.cells]
    recommendation = None
    fastest = fastest_of(study.answers)
    if fastest is not None:
        recommendation = cells[record.cells.index(fastest)]
    laws = []
    for series, law in study.laws.items():
        laws.append(_law_of_series(series, law, K_STAR))
    for series, law in study.median_laws.items():
        laws.append(_law_of_series(series, law, MEDIAN))
    trained = set(record.trained_cells)  # the other cells show the trials of an equal cell
    pending = sum(summary.pending for summary in study.cells if summary.cell in trained)
    is_quiet = any(seconds.source == QUIET for seconds in study.step_seconds.values())
    further = {
        "workload": record.workload,
        "statistic": record.statistic.name,
        "pending": pending,
        "hardware": [each for each in record.hardware if each is not None],
        "step_timing": _conditions(record.step_timing) if is_quiet else None,
        "noise_scale": None if record.noise is None else record.noise.to_dict(),
    }
    return Document(
        source="study",
        status=_status(study.cells, pending),
        name=record.name,
        goal=str(record.goal),
        unit=record.goal.cost_unit.name,
        cells=cells,
        laws=laws,
        recommendation=recommendation,
        notes=notes,
        report=report,
        further=further,
    )


def cell_entry(study: Analysis, summary: CellSummary) -> CellEntry:
    """Return the entry of a cell of a study."""
    cell = summary.cell
    entry = CellEntry(
        batch_size=cell.batch_size, sparsity=cell.series.sparsity, axes=dict(cell.series.axes)
    )
    entry.trials = {str(status): summary.counts[status] for status in FINAL_STATUSES}
    entry.trials |= {"pending": summary.pending}
    entry.range_edges = dict(summary.boundary)
    if summary.best is not None:
        entry.metaparameters = dict(summary.best.trial.params)
        entry.trial = summary.best.trial.point
    row = study.answers.get(cell)
    if row is not None:
        _add_answer(entry, study, summary, row)
    marks = list(entry.marks)
    if any(can_move(study.record, key, end) for key, end in summary.boundary.items()):
        marks.append("range_edge")
    if summary.pending:
        marks.append("pending")
    entry.marks = marks
    return entry


def _add_answer(entry: CellEntry, study: Analysis, summary: CellSummary, row: Row) -> None:
    """Add K*, steps, examples and times of a cell that has a K*."""
    law = study.laws[summary.cell.series]
    interval = None
    if study.record.goal.cost_unit.has_law:
        interval = law.limits.get(summary.cell.batch_size)
    if interval is not None:
        per_step = law.unit.per_step(summary.cell.batch_size)
        interval = Interval(interval.low * per_step, interval.high * per_step)
    assert summary.k_star is not None
    entry.k_star = limits_of(summary.k_star, interval)
    entry.bound = "at most" if summary.is_upper_bound else "exact"
    entry.steps = limits(row["steps"], row["steps_low"], row["steps_high"])
    entry.steps_known = "measured" if row["why_not_law"] else "law"
    entry.examples = row["examples"]
    entry.step_seconds = row["step_seconds"]
    if row["step_seconds"] is not None:
        entry.step_seconds_quartiles = [row["step_low"], row["step_high"]]
    entry.timing = row["timing"]
    entry.validation_seconds = row["validation_seconds"]
    if row["seconds"] is not None:
        entry.seconds = limits(row["seconds"], row["seconds_low"], row["seconds_high"])
    if row["total_seconds"] is not None:
        entry.total_seconds = limits(row["total_seconds"], row["total_low"], row["total_high"])
    marks = {
        "fastest": row["fastest"],
        "tied": row["tied"] and not row["fastest"],
        "near": row["near"] and not row["fastest"],
        "fewest_examples": row["fewest"],
        "upper_bound": is_upper_bound(row),
        "busy_machine": row["busy"],
    }
    entry.marks = [name for name, holds in marks.items() if holds]


def run_document(
    attempt: Attempt,
    entry: CellEntry,
    name: str | None,
    checkpoint: str | None,
    examples_of: Callable[[int], float | None],
) -> Document:
    """Return the document of one run of `fit`.

    Args:
        attempt: The run, with its validations.
        entry: The batch size of the run, and what else is known of its cell.
        name: The study of the trial that was trained again; None without a study.
        checkpoint: Path of the checkpoint; None without one.
        examples_of: Returns the examples of the first steps of the run; None if unknown.
    """
    last_value = None
    last_step = None
    notes = []
    if attempt.curve["step"]:
        last_step = int(attempt.curve["step"][-1])
        if attempt.curve.get("exact", [1])[-1]:
            last_value = attempt.curve[attempt.goal.metric][-1]
        else:
            notes.append(
                "last_value is unknown, because the validation stopped early: "
                f"{attempt.last_validation}."
            )
    steps = attempt.steps_to_result
    if steps is None:
        steps = last_step
        entry.bound = "at least"
    elif steps <= attempt.goal.first_possible_step:
        entry.bound = "at most"
        entry.marks = ["upper_bound"]
    else:
        entry.bound = "exact"
    entry.steps = None
    if steps is not None:
        entry.steps = limits(steps)
        entry.steps_known = "measured"
        entry.examples = examples_of(steps)
        if entry.examples is None:
            notes.append("The examples are unknown: the size of every batch is not known.")
    timed_steps = attempt.timed.get("steps")
    if timed_steps:
        entry.step_seconds = attempt.timed["training"] / timed_steps
    if timed_steps == attempt.steps_to_result is not None:
        entry.seconds = limits(attempt.timed["training"])
        entry.total_seconds = entry.seconds
    return Document(
        source="fit",
        status=ANSWERED if attempt.steps_to_result is not None else NO_RESULT,
        name=name,
        goal=str(attempt.goal),
        cells=[dataclasses.asdict(entry)],
        notes=notes,
        further={"outcome": attempt.outcome, "last_value": last_value, "checkpoint": checkpoint},
    )


def law_entry(law: Law) -> LawEntry:
    """Return the entry of a law, without its series."""
    entry = LawEntry(batch_sizes=list(law.exact_k))
    if law.fit is not None:
        entry.c1 = limits_of(law.fit.c1, law.c1_interval)
        entry.c2 = limits_of(law.fit.c2, law.c2_interval)
        if law.is_b_crit_known:
            entry.critical_batch_size = limits_of(law.fit.critical_batch_size, law.b_crit_interval)
    entry.critical_batch_size_above = law.verdict.bound
    entry.refused = REFUSED[law.verdict.trust]
    entry.reason = str(law.verdict)
    entry.text = law.line()
    return entry


def _law_of_series(series: Series, law: Law, statistic: str) -> LawEntry:
    """Return the entry of the law of a series of a study."""
    entry = law_entry(law)
    entry.sparsity = series.sparsity
    entry.axes = dict(series.axes)
    entry.statistic = statistic
    return entry


def _conditions(timing: StepTiming | None) -> dict[str, Any] | None:
    """Return the conditions under which the steps of a study were timed."""
    if timing is None:
        return None
    return {
        "machine": timing.machine,
        "date": timing.date,
        "threads": timing.threads,
        "ranks": timing.ranks,
    }


def _status(cells: Sequence[CellSummary], pending: int) -> str:
    """Return the status of a study with some pending trials."""
    if any(cell.k_star is not None for cell in cells):
        return ANSWERED
    return UNFINISHED if pending else NO_RESULT


def _plain(node: Any, place: str, not_finite: dict[str, str]) -> Any:
    """Return nested values as plain JSON, with null for numbers that are not finite.

    Args:
        node: The value.
        place: Where it is in the document.
        not_finite: Receives the places of numbers that are not finite.
    """
    if isinstance(node, Mapping):
        plain = {}
        for key, value in node.items():
            plain[str(key)] = _plain(value, f"{place}.{key}", not_finite)
        return plain
    if isinstance(node, (list, tuple, frozenset, set)):
        return [_plain(value, f"{place}[{i}]", not_finite) for i, value in enumerate(node)]
    if hasattr(node, "item"):
        node = node.item()
    if isinstance(node, float) and not math.isfinite(node):
        not_finite[place] = json.dumps(node)
        return None
    if node is None or isinstance(node, (str, bool, int, float)):
        return node
    return str(node)
