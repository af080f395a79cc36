"""Stacked training: a bare loop, the engine without and with checks, a study, a stranger's GPT.

All run on the same device in one run, so that their ratios say what each layer costs.
"""

from __future__ import annotations

import dataclasses
import math
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import torch

from benchmarks import stacked_tables
from benchmarks.bare_stack import (
    BF16,
    FLOAT32,
    FLOPS_PER_EXAMPLE,
    GROUPS,
    INTERVAL_STEPS,
    PRODUCTS,
    TF32,
    Variant,
    bare_rate,
    set_tf32,
)
from benchmarks.options import Options
from benchmarks.setups import (
    MOMENTUM_CONFIG,
    UNREACHABLE,
    middle_trial,
    on_device,
    paper_setup,
)
from benchmarks.stacked_tables import (
    EARLY_CHECKS,
    FULL_CHECKS,
    GOAL_ERROR,
    BareRow,
    EngineRow,
    StackedReport,
    StudyRun,
)
from benchmarks.step import now, threads
from benchmarks.stranger import measure_stranger
from lit_dps.core.attempt import Attempt
from lit_dps.core.trial import SINGLE, STACKED, Cell, Status
from lit_dps.engines.trial_engine import TrialEngine
from lit_dps.engines.trial_settings import TrialSettings
from lit_dps.storage.read import read_study
from lit_dps.study.setup import StudySetup
from lit_dps.training.checkpoint_files import steps_saved

TITLE = "Stacked training beside a bare loop"
COMMAND = Path(__file__).parents[1] / "cli.py"
SPARSITY = 0.9  # of half of the engine's networks; the others are dense
# Dense peak of one card in TFLOP/s, from NVIDIA's data sheet (SXM).
HOPPER_PEAKS = {FLOAT32: 67.0, TF32: 494.7, BF16: 989.4}
PEAKS = {"H100": HOPPER_PEAKS, "H200": HOPPER_PEAKS}
# Seconds that a study may need to save its trials after an interrupt.
STOP_SECONDS = 30.0
# A graph is captured in the first interval, and compared in the second.
WARM_UP_CHECKS = 3
LOG_CHARACTERS = 3000  # of the output of the study


@dataclass(frozen=True)
class Case:
    """Networks that train at once.

    Attributes:
        networks: Number of networks; 1 is trained by the engine for single networks.
        batch_size: Examples of a step of each network.
        interval: Steps between two checks in the measurement without checks.
        checks: Which checks are measured: `EARLY_CHECKS`, `FULL_CHECKS`.
        in_engine: Whether the engine is measured, besides the bare loop.
    """

    networks: int
    batch_size: int
    interval: int
    checks: tuple[str, ...] = ()
    in_engine: bool = True


@dataclass(frozen=True)
class Plan:
    """What is measured on a device.

    Attributes:
        cases: Networks and batch sizes.
        variants: Ways to write the bare loop.
        seconds: Seconds of each measurement of the bare loop, at least.
        intervals: Intervals of the engine without checks. The first `WARM_UP_CHECKS` are not timed,
            or the first alone if there are no more.
        checked_intervals: Intervals of the engine with checks, likewise.
        study_batch_size, study_trials: The only cell of the study.
        stranger_steps, stranger_repeats: Timed steps of the GPT, and repeats.
    """

    cases: tuple[Case, ...]
    variants: tuple[Variant, ...]
    seconds: float
    intervals: int
    checked_intervals: int
    study_batch_size: int
    study_trials: int
    stranger_steps: int
    stranger_repeats: int


EAGER = (Variant(PRODUCTS), Variant(GROUPS))
GRAPHS = tuple(
    Variant(convolutions, precision, is_graph=True)
    for precision in (FLOAT32, TF32, BF16)
    for convolutions in (PRODUCTS, GROUPS)
)
PLANS = {
    "cuda": Plan(
        cases=(
            Case(100, 2, 128, (EARLY_CHECKS,)),
            Case(100, 16, 128, (EARLY_CHECKS, FULL_CHECKS)),
            Case(100, 128, 32),
            Case(25, 512, 32),
            Case(1, 16, 256),
            Case(1, 128, 256),
            Case(1, 1024, 128, in_engine=False),
        ),
        variants=(*EAGER, *GRAPHS),
        seconds=0.15,
        intervals=2,
        checked_intervals=8,
        study_batch_size=16,
        study_trials=100,
        stranger_steps=100,
        stranger_repeats=2,
    ),
    "cpu": Plan(
        cases=(Case(8, 2, 64, (EARLY_CHECKS,)), Case(8, 16, 16, (EARLY_CHECKS, FULL_CHECKS))),
        variants=EAGER,
        seconds=1.0,
        intervals=2,
        checked_intervals=3,
        study_batch_size=16,
        study_trials=8,
        stranger_steps=100,
        stranger_repeats=3,
    ),
}
# A rehearsal of all code, on small images that need no files.
QUICK_PLAN = Plan(
    cases=(Case(2, 2, 8, (EARLY_CHECKS, FULL_CHECKS)), Case(1, 2, 8)),
    variants=(Variant(PRODUCTS), Variant(GROUPS, BF16)),
    seconds=0.0,
    intervals=2,
    checked_intervals=2,
    study_batch_size=16,
    study_trials=2,
    stranger_steps=4,
    stranger_repeats=1,
)


@dataclass(frozen=True)
class Pace:
    """How fast an engine trains.

    Attributes:
        setup_seconds: Seconds of a trial before its first step.
        rate: Network-steps a second after the first `WARM_UP_CHECKS` intervals.
    """

    setup_seconds: float
    rate: float


def show(found: StackedReport) -> str:
    """Return the four tables."""
    return stacked_tables.text(found)


def measure(options: Options) -> StackedReport:
    """Measure on the GPU if there is one, else on the CPU; with one CPU thread."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    plan = QUICK_PLAN if options.quick else PLANS[device]
    setup = on_device(paper_setup(options.quick, MOMENTUM_CONFIG), device)
    with threads(1):
        bare = tuple(_bare_row(case, plan, device) for case in plan.cases)
        engine = _engine_rows(setup, plan, bare, device)
        stranger = measure_stranger(device, plan.stranger_steps, plan.stranger_repeats)
        _log(f"stranger: {stranger}")
        study = _study_run(plan, options, device, bare, engine)
    return StackedReport(
        device, setup.workload_name(), INTERVAL_STEPS, bare, engine, study, stranger
    )


def _bare_row(case: Case, plan: Plan, device: str) -> BareRow:
    """Measure the bare loop for one case."""
    row = BareRow(case.networks, case.batch_size)
    peaks = peaks_of_card()
    for variant in plan.variants:
        try:
            rate = bare_rate(case.networks, case.batch_size, device, variant, plan.seconds)
        except torch.OutOfMemoryError:
            rate = math.nan
        name = str(variant)
        row.rates[name] = rate
        if variant.precision in peaks:
            flops = rate * case.batch_size * FLOPS_PER_EXAMPLE
            row.shares[name] = flops / (1e12 * peaks[variant.precision])
        if device == "cuda":
            torch.cuda.empty_cache()
    set_tf32(False)
    _log(f"bare loop, {case.networks} x {case.batch_size}: {row.rates}")
    return row


def peaks_of_card() -> dict[str, float]:
    """Return the peak of the card in TFLOP/s by precision; empty if it is unknown."""
    if not torch.cuda.is_available():
        return {}
    name = torch.cuda.get_device_name(0)
    for card, peaks in PEAKS.items():
        if card in name:
            return peaks
    return {}


def best_float32_rate(row: BareRow) -> float:
    """Return the rate of the fastest bare loop in full float32."""
    rates = []
    for name, rate in row.rates.items():
        if name.endswith(FLOAT32) and math.isfinite(rate):
            rates.append(rate)
    return max(rates, default=math.nan)


def _engine_rows(
    setup: StudySetup, plan: Plan, bare: Sequence[BareRow], device: str
) -> tuple[EngineRow, ...]:
    """Measure the engine for each case, in full float32."""
    set_tf32(False)
    rows = []
    for case, bare_row in zip(plan.cases, bare, strict=True):
        if not case.in_engine:
            continue
        # One check in many steps, which stops at the first mistake.
        pace = _pace(setup, case, case.interval, UNREACHABLE, plan.intervals, device)
        with_checks = {}
        for kind in case.checks:
            error = None if kind == FULL_CHECKS else GOAL_ERROR
            checked = _pace(setup, case, INTERVAL_STEPS, error, plan.checked_intervals, device)
            with_checks[kind] = checked.rate
        over_bare = pace.rate / best_float32_rate(bare_row)
        row = EngineRow(
            case.networks,
            case.batch_size,
            pace.setup_seconds,
            pace.rate,
            over_bare,
            with_checks,
        )
        _log(f"engine: {row}")
        rows.append(row)
    return tuple(rows)


def _pace(
    setup: StudySetup,
    case: Case,
    interval: int,
    error: float | None,
    intervals: int,
    device: str,
) -> Pace:
    """Train the networks of a case for a number of intervals.

    Args:
        setup: The workload.
        case: Networks and batch size.
        interval: Steps between two checks.
        error: Goal error of early checks; None for full checks, with a goal that is not reached.
        intervals: Intervals, at least 2.
        device: "cpu" or "cuda".
    """
    goal_config = dataclasses.replace(
        setup.goal,
        error=error or UNREACHABLE,
        check_interval=interval,
        max_steps=interval * intervals,
        early_reject=error is not None,
    )
    pruning = dataclasses.replace(setup.pruning, method="magnitude")  # it needs no scoring pass
    # As in a study, which stacks at least two networks, and on a GPU a network without company.
    on_gpu = device == "cuda"
    stack_size = max(case.networks, 2 if on_gpu else 1)
    training = TrialSettings(setup.workload, goal_config, pruning)
    engine = TrialEngine(training, stack_size, stacks_alone=on_gpu)
    attempts = []
    for point in range(case.networks):
        cell = Cell(case.batch_size, SPARSITY if point % 2 else 0.0)
        attempts.append(Attempt(middle_trial(setup, cell, point), goal_config.build()))
    waiting = [*attempts]
    stamps: list[tuple[float, int]] = []

    def next_attempt() -> Attempt | None:
        return waiting.pop(0) if waiting else None

    def stamp() -> None:
        stamps.append((now(device), steps_taken(attempts)))

    begin = now(device)
    expected = STACKED if stack_size > 1 else SINGLE
    for result in engine.train(next_attempt, stamp):
        if result.status is Status.FAILED or result.engine != expected:
            raise RuntimeError(result.traceback or result.engine_reason)
    stamp()
    first_time, first_steps = stamps[min(WARM_UP_CHECKS, len(stamps) - 1) - 1]
    last_time, last_steps = stamps[-1]
    rate = (last_steps - first_steps) / (last_time - first_time)
    # The first intervals also load kernels and capture graphs, which counts as set-up here.
    setup_seconds = first_time - begin - first_steps / rate
    return Pace(setup_seconds / case.networks, rate)


def steps_taken(attempts: Sequence[Attempt]) -> int:
    """Return the optimizer steps of all attempts up to their last checks."""
    total = 0
    for attempt in attempts:
        if attempt.curve["step"]:
            total += int(attempt.curve["step"][-1])
    return total


def _study_run(
    plan: Plan,
    options: Options,
    device: str,
    bare: Sequence[BareRow],
    engine: Sequence[EngineRow],
) -> StudyRun:
    """Run a study by the command line, interrupt it after `options.study_seconds`, and read it."""
    batch_size = plan.study_batch_size
    with tempfile.TemporaryDirectory() as folder:
        arguments = {
            "--config": str(MOMENTUM_CONFIG),
            "--study.batch_sizes": f"[{batch_size}]",
            "--study.sparsities": "[0]",
            "--study.trials": str(plan.study_trials),
            "--study.race_factor": "1",
            "--study.engine": "auto" if device == "cuda" else "stacked",
            "--study.workers": "1",
            "--study.name": "stacked",
            "--trainer.accelerator": "gpu" if device == "cuda" else "cpu",
            "--goal.error": str(GOAL_ERROR),
            "--storage.folder": folder,
        }
        if options.quick:
            arguments["--data"] = "lit_dps.data.Digits"
            arguments["--goal.error"] = "0.5"
            arguments["--goal.max_steps"] = "64"
        command = [sys.executable, str(COMMAND), "study"]
        for key, value in arguments.items():
            command += [key, value]
        begin = time.time()
        _run_for(command, options.study_seconds)
        end = time.time()
        database = Path(folder, "study.db")
        record = read_study(f"sqlite:///{database}", "stacked")
        first, last = _training_times(database)
        interrupted = [steps_saved(path) or 0 for path in Path(folder).rglob("*.ckpt")]
    results = []
    for cell_results in record.results.values():
        results += cell_results
    engines: dict[str, int] = {}
    for result in results:
        engines[result.engine] = engines.get(result.engine, 0) + 1
    if len(results) < plan.study_trials:
        last = end  # the limit interrupted the others
    steps_done = sum(result.steps_run for result in results)
    rate = (steps_done + sum(interrupted)) / (last - first)
    engine_rates = [row.without_checks for row in engine if _is_stack(row, batch_size)]
    bare_rates = [best_float32_rate(row) for row in bare if _is_stack(row, batch_size)]
    reached = [result.steps for result in results if result.steps is not None]
    run = StudyRun(
        batch_size=batch_size,
        trials=plan.study_trials,
        sparsity=0.0,
        seconds=end - begin,
        training_seconds=last - first,
        trials_done=len(results),
        engines=engines,
        steps_done=steps_done,
        steps_saved=sum(interrupted),
        best_steps=min(reached, default=None),
        rate=rate,
        over_engine=rate / max(engine_rates, default=math.nan),
        over_bare=rate / max(bare_rates, default=math.nan),
    )
    _log(f"study: {run}")
    return run


def _is_stack(row: BareRow | EngineRow, batch_size: int) -> bool:
    return row.networks > 1 and row.batch_size == batch_size


def _run_for(command: Sequence[str], limit: float) -> None:
    """Run a command, and interrupt it after `limit` seconds."""
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, start_new_session=True, env=os.environ.copy()
        )
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        _log(f"the study exited with {process.returncode}:\n{output.read()[-LOG_CHARACTERS:]}")


def _training_times(database: Path) -> tuple[float, float]:
    """Return when the first trial began and the last one ended, as timestamps; nan if none did."""
    query = "select min(datetime_start), max(datetime_complete) from trials"
    with closing(sqlite3.connect(database)) as connection:
        row = connection.execute(query).fetchone()
    first, last = (math.nan if t is None else datetime.fromisoformat(t).timestamp() for t in row)
    return first, last


def _log(text: str) -> None:
    # Each part is printed at once, so that a time limit loses only the rest.
    print(text, file=sys.stderr, flush=True)
