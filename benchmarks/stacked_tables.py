"""The rows and the tables of `benchmarks.stacked`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from benchmarks.stranger import BARE, BATCH_SIZE, StrangerSteps
from benchmarks.text import NO_GPU, ratio, seconds, table, times
from lit_dps.core.text import format_duration

GOAL_ERROR = 0.02
EARLY_CHECKS = "early checks"
FULL_CHECKS = "full checks"


@dataclass(frozen=True)
class BareRow:
    """Network-steps a second of the bare loop for one case, and the shares of the card's peak."""

    networks: int
    batch_size: int
    rates: dict[str, float] = field(default_factory=dict)
    shares: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class EngineRow:
    """The engine for one case.

    Attributes:
        networks, batch_size: The case.
        setup_seconds: Seconds of a trial before its first step.
        without_checks: Network-steps a second, with one check in many steps.
        over_bare: `without_checks` over the fastest bare loop in full float32.
        with_checks: Network-steps a second with a check every 16 steps, by kind of check.
    """

    networks: int
    batch_size: int
    setup_seconds: float
    without_checks: float
    over_bare: float
    with_checks: dict[str, float]


@dataclass(frozen=True)
class StudyRun:
    """A study from the command line, stopped after a limit of time.

    Attributes:
        batch_size, trials, sparsity: Its only cell.
        seconds: Wall time of the command.
        training_seconds: From the begin of the first trial to the end of the last one.
        trials_done: Trials with a result.
        engines: Trials of each loop.
        steps_done: Optimizer steps of these trials.
        steps_saved: Optimizer steps of the trials that the limit interrupted.
        best_steps: K*; None if no trial met the goal.
        rate: Network-steps a second over `training_seconds`.
        over_engine: `rate` over the engine without checks at that batch size.
        over_bare: `rate` over the fastest bare loop in full float32 at that batch size.
    """

    batch_size: int
    trials: int
    sparsity: float
    seconds: float
    training_seconds: float
    trials_done: int
    engines: dict[str, int]
    steps_done: int
    steps_saved: int
    best_steps: int | None
    rate: float
    over_engine: float
    over_bare: float


@dataclass(frozen=True)
class StackedReport:
    """All measurements on one device."""

    device: str
    workload: str
    interval_steps: int
    bare: tuple[BareRow, ...]
    engine: tuple[EngineRow, ...]
    study: StudyRun
    stranger: StrangerSteps


def text(found: StackedReport) -> str:
    """Return the four tables."""
    parts = [
        f"{found.workload}, Simple-CNN on 28 x 28 images, momentum, masks; device: {found.device}. "
        "Rates are network-steps a second: optimizer steps, summed over the networks. Engine and "
        "bare loop are in full float32 unless a column says otherwise.",
        _bare_text(found),
        _engine_text(found),
        _study_text(found.study),
        _stranger_text(found.stranger),
    ]
    if found.device != "cuda":
        parts.append(f"On a GPU: {NO_GPU}.")
    return "\n\n".join(parts)


def _rate(value: float) -> str:
    if math.isnan(value):
        return "not measured"
    return f"{value:,.0f}"


def _bare_text(found: StackedReport) -> str:
    variants = list(found.bare[0].rates)
    rows = []
    for row in found.bare:
        cells = []
        for name in variants:
            text = _rate(row.rates[name])
            if name in row.shares and math.isfinite(row.shares[name]):
                text += f" ({row.shares[name]:.1%})"
            cells.append(text)
        rows.append([row.networks, row.batch_size, *cells])
    text = (
        "**A bare loop**, written without lit_dps: gather, forward, backward, mask, update. "
        f"A graph holds {found.interval_steps} steps. In brackets: the share of the card's peak "
        "in that precision."
    )
    return f"{text}\n\n{table(['networks', 'B', *variants], rows)}"


def _engine_text(found: StackedReport) -> str:
    head = [
        "networks",
        "B",
        "set-up of a trial",
        "without checks",
        "/ bare loop",
        EARLY_CHECKS,
        FULL_CHECKS,
    ]
    rows = []
    for row in found.engine:
        checked = []
        for kind in (EARLY_CHECKS, FULL_CHECKS):
            checked.append(_rate(row.with_checks[kind]) if kind in row.with_checks else "")
        rows.append(
            [
                row.networks,
                row.batch_size,
                format_duration(row.setup_seconds),
                _rate(row.without_checks),
                ratio(row.over_bare),
                *checked,
            ]
        )
    text = (
        "**The engine**, after its first intervals. Without checks: one check in many steps. Early "
        f"checks: every {found.interval_steps} steps, far from the goal of {GOAL_ERROR:g}. Full "
        "checks: the entire validation split each time. The bare loop is the fastest one in full "
        "float32. Set-up is from the start to the first step, divided by the networks."
    )
    return f"{text}\n\n{table(head, rows)}"


def _study_text(run: StudyRun) -> str:
    loops = ", ".join(f"{count} {name}" for name, count in run.engines.items()) or "none"
    best = "no trial met the goal" if run.best_steps is None else f"K* = {run.best_steps:,}"
    return (
        f"**A study from the command line**: B = {run.batch_size}, S = {run.sparsity:g}, "
        f"{run.trials} trials, race factor 1. {run.trials_done} trials have a result ({loops}); "
        f"{best}. {run.steps_done:,} steps of these trials and {run.steps_saved:,} steps of "
        f"interrupted trials in {run.training_seconds:.1f} s of training "
        f"({run.seconds:.1f} s with start and report): **{_rate(run.rate)} network-steps/s**, "
        f"{ratio(run.over_engine)} of the engine without checks and {ratio(run.over_bare)} of the "
        "bare loop."
    )


def _stranger_text(found: StrangerSteps) -> str:
    rows = []
    for name, sample in found.seconds.items():
        over = "" if name == BARE else times(found.ratios[name])
        rows.append([name, seconds(sample), over])
    text = (
        f"**A stranger's GPT** of {found.parameters:,} parameters, {BATCH_SIZE} windows of "
        f"{found.context} tokens a step, {found.precision}, AdamW, the same loader "
        f"(num_workers 0) in all loops, {found.steps} steps."
    )
    return f"{text}\n\n{table(['loop', 'a step', 'ratio to the bare loop'], rows)}"
