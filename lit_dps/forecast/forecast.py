"""Forecast of a study before it runs: trials, steps, validations and time. For the
paper's workloads also the time of its protocol.

Lee et al. (2021, Appendix B) report 14 million passes over the validation split and 162 days for a
workload: 14 batch sizes x 4 sparsities x 100 trials, each of 40,000 steps, validated every 16.
"""

from __future__ import annotations

from lit_dps.core import paper_protocol as protocol
from lit_dps.core.record import grid
from lit_dps.core.text import WIDTH, format_duration
from lit_dps.core.trial import LIGHTNING, SINGLE
from lit_dps.forecast.remaining import (
    Points,
    max_work,
    nearest_record,
    pruning_passes,
    stored_record,
    total_work,
)
from lit_dps.forecast.step_times import Timing, measure, single_gradient_seconds
from lit_dps.forecast.table import pruning_seconds, study_table, training_seconds
from lit_dps.readings.lipschitz import gammas
from lit_dps.study.setup import StudySetup


def forecast(setup: StudySetup, width: int = WIDTH) -> str:
    """Return what remains of a study as text, after a short timing; nothing is stored.

    Args:
        setup: The study, after its checks.
        width: Columns of the terminal, for the table.

    Raises:
        StorageError: If the study is stored and cannot be read.
        ConfigError: If a pruning pass is needed and the data have no finite one.
    """
    record = stored_record(setup)
    results = {}
    if record is not None:
        results = record.results
        setup = setup.with_stored_trials(record)
    points = setup.remaining_points(results)
    timing = measure(setup)
    lines = [
        f"forecast of study {setup.study.name}; no trial runs, and nothing is stored",
        *_timing_remarks(setup, timing),
    ]
    smoothness = _smoothness_remark(setup, points, timing)
    if smoothness is not None:
        lines.append(smoothness)
    if setup.study.readings:
        lines.append("these times exclude study.readings")
    basis = nearest_record(setup, record)
    lines += ["", *study_table(setup, points, record, timing, basis, width)]
    goal = protocol.protocol_of(setup.config())
    if goal is not None:
        lines += ["", *_paper_lines(setup, timing, goal)]
    return "\n".join(lines)


def _timing_remarks(setup: StudySetup, timing: Timing) -> list[str]:
    """Return how steps were timed, and what the times leave out, a line each."""
    study = setup.study
    batch_sizes = [measured.batch_size for measured in timing.measured]
    largest = max(batch_sizes)
    threads = f"{study.threads} thread{'s' * (study.threads != 1)}"
    overhead, per_example = format_duration(timing.step.a), format_duration(timing.step.b)
    line = f"a step takes {overhead} + {per_example} x B"
    if len(batch_sizes) > 2:  # two always fit a line
        line += f", within {timing.misfit:.0%} of the timed steps"
    if max(study.batch_sizes) > largest:
        line += f"; times above B = {largest} are extrapolated"
    lines = [f"timed at B = {', '.join(map(str, batch_sizes))} with {threads}", line]
    if study.axes:
        axes = ", ".join(f"{key} = {value}" for key, value in study.cells[0].axes)
        lines.append(f"timed at {axes}; other values may take longer")
        prunes = max(study.sparsities) > 0
        if prunes and any(key.startswith("pruning.") for key in study.axes):
            lines.append("a pruning pass takes the mean over the pruning methods")
    if setup.grows_batches:
        lines.append(
            "timed at the batch size of each cell; smaller batches of batch.schedule take less time"
        )
    if study.engine not in (SINGLE, LIGHTNING):
        lines.append(f"timed one trial at a time; study.engine = {study.engine} may be faster")
    if setup.workers > 1:
        lines.append(
            f"{setup.workers} trials at a time; each is assumed to be as fast as one alone"
        )
    if timing.min_check_share < 1:
        lines.append(
            f"a validation that stops early reads {timing.min_check_share:.0%} of the "
            "validation split, or a little more"
        )
    if study.race_factor is not None:
        lines.append(
            "study.race_factor stops trials that cannot win, so the real time will be shorter"
        )
    return lines


def _smoothness_remark(setup: StudySetup, points: Points, timing: Timing) -> str | None:
    """Return what measuring the smoothness costs, which the table leaves out; None if it is off.

    A measured example costs as much as an example in training.
    """
    config = setup.smoothness
    if config.interval is None:
        return None
    measurements = setup.built_goal.max_steps // config.interval
    passes = len(gammas(config.delta, config.last)) + 1
    examples = "all training examples"
    if config.examples is not None:
        examples = f"{config.examples:,} training examples"
    cost = _smoothness_cost(setup, points, timing, measurements, passes)
    return (
        f"smoothness: at most {measurements:,} measurements per trial, each of {passes} passes "
        f"over {examples}; {cost}. The times below exclude them, and the gradient variance at the "
        "start"
    )


def _smoothness_cost(
    setup: StudySetup, points: Points, timing: Timing, measurements: int, passes: int
) -> str:
    """Return the time that measuring the smoothness takes, in words.

    Args:
        setup, points, timing: As of `study_table`.
        measurements: Measurements of a trial.
        passes: Passes over the examples in a measurement.
    """
    noise_per_example = single_gradient_seconds(setup)  # 0 if no noise is measured
    if setup.smoothness.examples is None:
        text = "their time is unknown, because the number of examples is unknown here"
        if noise_per_example:
            text += f"; the gradient noise adds {format_duration(noise_per_example)} per example"
        return text
    trials = sum(map(len, points.values()))
    examples = trials * measurements * setup.smoothness.examples / setup.workers
    text = "their time is too short to measure here"
    if timing.step.b:
        text = f"they take {format_duration(examples * passes * timing.step.b)} in all"
    if noise_per_example:
        # The noise takes one pass of a measurement.
        text += f"; the gradient noise adds {format_duration(examples * noise_per_example)}"
    return text


def _paper_lines(setup: StudySetup, timing: Timing, goal: protocol.Protocol) -> list[str]:
    """Return how long the paper's protocol for the workload would take here."""
    cells = grid(protocol.BATCH_SIZES, protocol.SPARSITIES)
    points = dict.fromkeys(cells, range(protocol.TRIALS))
    most = max_work(points, dict.fromkeys(points, goal.max_steps), goal.check_interval)
    total = total_work(most.values())
    passes = pruning_passes(points, setup.workers, timing.reuses_scores)
    seconds = training_seconds(most, timing) + pruning_seconds(passes, timing)
    return [
        f"the paper's protocol, {len(protocol.BATCH_SIZES)} batch sizes x "
        f"{len(protocol.SPARSITIES)} sparsities x {protocol.TRIALS} trials of {goal.max_steps:,} "
        f"steps, validated every {goal.check_interval}:",
        f"  at most {total.trials:,} trials, {total.steps:,.0f} steps, {total.checks:,.0f} "
        f"validations, {format_duration(seconds / setup.workers)} on this machine",
        "  the paper reports 14 million validations and 162 days for one workload (Lee et al. "
        "2021, Appendix B)",
    ]
