"""Forecast of a study before it runs: trials, steps, checks and time, beside those of the paper's
own protocol.

Lee et al. (2021, Appendix B) put a workload of 14 batch sizes x 4 sparsities x 100 trials, each
with its budget of 40,000 steps spent and checked every 16, at 14 million passes over the validation
split and 162 days.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from lit_dps.core import paper_protocol as protocol
from lit_dps.core.format import format_duration
from lit_dps.core.noise_scale import read_at
from lit_dps.core.racing import rungs
from lit_dps.core.record import StudyRecord, grid
from lit_dps.core.trial import LIGHTNING, SINGLE, Cell
from lit_dps.forecast.basis import along_laws, laws_of, nearest_record, stored_record, told_by
from lit_dps.forecast.remaining import (
    Points,
    Work,
    at_most,
    expected,
    not_above,
    passes_of_repeats,
    pruning_passes,
    repeats_at_most,
    repeats_expected,
)
from lit_dps.readings import SmoothnessCallback
from lit_dps.study.noise import MAX_SECONDS, STEPS
from lit_dps.study.setup import StudySetup
from lit_dps.study.step_probe import Timing, measure, single_gradient_seconds


def training_seconds(cells: Mapping[Cell, Work], timing: Timing, share: float = 1.0) -> float:
    """Seconds of the work of these cells, one trial after another, but without pruning.

    A check looks at that share of the validation split.
    """
    return sum(
        timing.trial_seconds(cell.batch_size, w.trials, w.steps, share * w.checks)
        for cell, w in cells.items()
    )


def pruning_seconds(passes: Mapping[int, int], timing: Timing) -> float:
    """Seconds of all pruning passes, one after another."""
    return sum(n * timing.pruning.at(1 / batch_size) for batch_size, n in passes.items())


def forecast(setup: StudySetup) -> str:
    """What is left of a study that was checked, as text, by a short timing here; changes nothing in
    the storage.

    Raises:
        StorageError: if the study is there and cannot be read.
        ConfigError: if a pruning pass is needed and the data have no finite one.
    """
    record = stored_record(setup)
    points, timing = setup.left({} if record is None else record.results), measure(setup)
    lines = [
        f"forecast of study {setup.study.name}; nothing is run or stored",
        *_remarks(setup, timing),
        *_smoothness_remark(setup, points, timing),
        "",
        *study_table(setup, points, record, timing, nearest_record(setup, record)),
        "",
        *_paper_lines(setup, timing),
    ]
    return "\n".join(lines)


def _remarks(setup: StudySetup, timing: Timing) -> list[str]:
    sizes, threads, line = [m.batch_size for m in timing.measured], setup.study.threads, timing.step
    lines = [
        f"timed at B = {', '.join(map(str, sizes))} with {threads} thread{'s' * (threads > 1)}",
        f"at any B a step takes {format_duration(line.a)} + {format_duration(line.b)} x B",
    ]
    if len(sizes) > 2:  # two lie on a line in any case
        lines[-1] += f", within {timing.misfit:.0%} of what was timed"
    if max(setup.study.batch_sizes) > max(sizes):
        lines[-1] += f"; above B = {max(sizes)} that is extrapolated"
    if setup.study.axes:
        first = ", ".join(f"{key} = {value}" for key, value in setup.study.cells[0].axes)
        lines.append(
            f"timed at {first}, pruning as the mean over its methods: other values may take longer"
        )
    if setup.study.engine not in (SINGLE, LIGHTNING):
        lines.append(f"timed one trial at a time; study.engine {setup.study.engine} may be faster")
    if setup.workers > 1:
        lines.append(f"{setup.workers} trials at a time, each taken to be as fast as one alone")
    if timing.min_check_share < 1:
        lines.append(
            f"a check that refuses early looks at {timing.min_check_share:.0%} of the validation "
            "split, or some more"
        )
    if setup.study.race_factor is not None:
        lines.append("study.race_factor stops trials before their budget, how soon is not known")
    return lines


def _smoothness_remark(setup: StudySetup, points: Points, timing: Timing) -> list[str]:
    """What measuring the smoothness takes on top, at the cost of an example in training."""
    measured = SmoothnessCallback.of(setup.smoothness)
    if measured.interval is None:
        return []
    each, passes = setup.goal_of_trials.max_steps // measured.interval, len(measured.gammas) + 1
    trials, noise, single = sum(map(len, points.values())), "", single_gradient_seconds(setup)
    if measured.examples is None:
        examples, time = "all training examples", "for which the time is not told"
        if single:
            noise = f"; its noise takes {format_duration(single)} more an example"
    else:
        seconds = trials * each * measured.examples / setup.workers
        examples = f"{measured.examples:,} training examples"
        time = (
            f"{format_duration(seconds * passes * timing.step.b)} in all"
            if timing.step.b
            else "too short to be timed here"
        )
        if single:
            noise = f"; their noise takes {format_duration(seconds * single)} more"
    return [
        f"smoothness: at most {each:,} measurements a trial, each of {passes} passes over "
        f"{examples}, {time}{noise}; "
        "not counted below, nor is the gradient variance at the start"
    ]


def noise_seconds(setup: StudySetup, timing: Timing) -> float:
    """Seconds of the run that reads the noise scale before the first trial: each of its steps takes
    about two."""
    return timing.start + min(
        MAX_SECONDS, 2 * STEPS * timing.step.at(read_at(setup.study.batch_sizes))
    )


def study_table(
    setup: StudySetup,
    points: Points,
    record: StudyRecord | None,
    timing: Timing,
    tells: StudyRecord | None = None,
) -> list[str]:
    """A row a batch size, of all that runs beside, and the total; and what the columns are.

    Args:
        setup: A study that was checked.
        points: The trials that are left, of every cell.
        record: What is stored of it, if anything is.
        timing: What things take here.
        tells: Whose trials tell what to expect (`likely.record_that_tells`); None for `record`.
    """
    goal, plan = setup.goal_of_trials, setup.study.repeat_plan
    tells = record if tells is None else tells
    again = repeats_at_most(plan, points, record, goal.max_steps, goal.check_interval)
    workers = min(
        setup.workers, max(1, sum(map(len, points.values())) + sum(again.values(), Work()).trials)
    )
    paused: Sequence[float] = []
    if setup.study.race_factor is not None:
        paused = rungs(goal.check_interval, goal.max_steps)[:-1]
    most = at_most(points, int(sum(paused)) + goal.max_steps, goal.check_interval)
    along = along_laws(laws := laws_of(tells))
    likely = expected(points, {} if tells is None else tells.results, goal.check_interval, along)
    likely_again = repeats_expected(plan, points, tells, goal.check_interval, along)
    likely = None if likely is None else not_above(likely, most)
    likely_again = None if likely_again is None else not_above(likely_again, again)
    columns = {"time at most": (most, again, 1.0)}
    if timing.min_check_share < 1:
        columns["checks early"] = (most, again, timing.min_check_share)
    if likely is not None:
        columns["time expected"] = (likely, likely_again or {}, timing.min_check_share)
    passes = Counter(pruning_passes(points, workers, timing.reuses_scores)) + Counter(
        passes_of_repeats(again)
    )
    pruning = pruning_seconds(passes, timing) / workers
    total, repeated = sum(most.values(), Work()), sum(again.values(), Work())
    told = record is not None and record.noise is not None
    reads = setup.study.noise_scale and not told and (total + repeated).trials > 0
    noise = noise_seconds(setup, timing) if reads else 0.0
    rows = [["B", "trials", "steps", "checks", "a step", "a check", "share of checks", *columns]]
    for batch_size in sorted({cell.batch_size for cell in points}):
        parts = [
            ({c: w for c, w in cells.items() if c.batch_size == batch_size}, share)
            for cells, _, share in columns.values()
        ]
        own = sum(parts[0][0].values(), Work())
        step, check = timing.step.at(batch_size), timing.check.at(1 / batch_size)
        share = check / (check + goal.check_interval * step)
        times = [
            format_duration(training_seconds(part, timing, share) / workers)
            for part, share in parts
        ]
        rows.append(
            [
                str(batch_size),
                *_counts(own),
                format_duration(step),
                format_duration(check),
                f"{share:.0%}",
                *times,
            ]
        )
    if repeated.trials:
        times = [
            format_duration(training_seconds(cells, timing, share) / workers)
            for _, cells, share in columns.values()
        ]
        rows.append(["repeats", *_counts(repeated), *[""] * 3, *times])
    if passes:
        n = sum(passes.values())
        rows.append(
            ["pruning", f"{n:,} passes", *[""] * 5, *[format_duration(pruning)] * len(columns)]
        )
    if reads:
        rows.append(
            ["noise scale", f"{STEPS} steps", *[""] * 5, *[format_duration(noise)] * len(columns)]
        )
    times = [
        format_duration(
            (training_seconds(c, timing, share) + training_seconds(r, timing, share)) / workers
            + pruning
            + noise
        )
        for c, r, share in columns.values()
    ]
    rows.append(["total", *_counts(total + repeated), *[""] * 3, *times])
    if not (total + repeated).trials:
        return [*_aligned(rows), "", "nothing is left to run"]
    lines = [
        *_aligned(rows),
        "",
        *_columns_explained(goal.max_steps, paused, total, likely, told_by(setup, tells, laws)),
    ]
    return lines + _repeats_explained(setup, repeated, likely_again)


def _repeats_explained(
    setup: StudySetup, most: Work, likely: Mapping[Cell, Work] | None
) -> list[str]:
    """What the repeats in the table are, where there are any."""
    if not most.trials:
        return []
    slack = setup.study.repeat_plan.slack
    until = "" if slack is None else f", or to {slack:g} x K* where a cell has one"
    lines = [
        f"repeats, at most: all of them, each to the step budget{until}, after the trials of its "
        "cell"
    ]
    if likely is not None:
        every = sum(likely.values(), Work())
        why = "as finished repeats of the nearest batch size, or as K* there"
        lines.append(
            f"repeats, expected: {every.steps:,.0f} steps of {every.trials:,} repeats, {why}"
        )
    return lines


def _columns_explained(
    max_steps: int,
    paused: Sequence[float],
    most: Work,
    likely: Mapping[Cell, Work] | None,
    told: str,
) -> list[str]:
    if not most.trials:
        return ["no trial of the search is left to run"]
    before = (
        f", after rungs of {', '.join(f'{step:,}' for step in paused)} steps," if paused else ""
    )
    text = (
        f"at most: every trial spends its budget of {max_steps:,} steps{before} and every "
        "check "
        "is a full one"
    )
    if likely is None:
        return [
            f"{text}; how much earlier they end is known once some have finished, or after "
            "lit-dps advise on it"
        ]
    return [text, f"expected: {sum(likely.values(), Work()).steps:,.0f} steps, from {told}"]


def _paper_lines(setup: StudySetup, timing: Timing) -> list[str]:
    goal = protocol.protocol_of(setup.config()) or protocol.MNIST
    max_steps, interval = goal.max_steps, goal.check_interval
    points = dict.fromkeys(grid(protocol.BATCH_SIZES, protocol.SPARSITIES), range(protocol.TRIALS))
    most = at_most(points, max_steps, interval)
    pruning = pruning_seconds(pruning_passes(points, setup.workers, timing.reuses_scores), timing)
    total, time = (
        sum(most.values(), Work()),
        (training_seconds(most, timing) + pruning) / setup.workers,
    )
    return [
        f"the paper's protocol, {len(protocol.BATCH_SIZES)} batch sizes x "
        f"{len(protocol.SPARSITIES)} sparsities x "
        f"{protocol.TRIALS} trials of {max_steps:,} steps, a check every {interval}:",
        f"  at most {total.trials:,} trials, {total.steps:,.0f} steps, {total.checks:,.0f} checks, "
        f"{format_duration(time)} on this machine",
        "  of one workload the paper says: 14 million checks, 162 days (Lee et al. 2021, Appendix "
        "B)",
    ]


def _counts(total: Work) -> list[str]:
    return [f"{total.trials:,}", f"{total.steps:,.0f}", f"{total.checks:,.0f}"]


def _aligned(rows: Iterable[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(x.rjust(width) for x, width in zip(row, widths, strict=True)) for row in rows]
