"""Writes the page on what `lit-dps advise` is worth on the workloads of configs/advice.

    python docs/advise_calibration.py measure [NAME ...]  # runs advise and `fit`, then writes
    python docs/advise_calibration.py studies NAME ...    # reads studies from mlruns, then writes
    python docs/advise_calibration.py                     # writes the page of the stored results

`advise_measuring.py` measures. Results are in docs/advise-calibration.json, the page is
docs/advise-calibration.md.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Iterable
from typing import Any

from advise_results import (
    COVERAGE_RANGE,
    FAR,
    MAX_ERROR,
    MAX_TIME_LOST,
    MAX_TRAININGS,
    MEDIAN_ERROR,
    PAGE,
    QUARTILES,
    QUIET_SHARE,
    WORKLOADS,
    Comparison,
    Workload,
    comparisons,
    cost_in_trainings,
    near_comparisons,
    read_results,
    time_lost,
    time_lost_by_fit,
    time_lost_by_study,
    times_to_goal,
)


def is_measured(results: dict[str, Any], workload: Workload) -> bool:
    """Return True if the results have the advice on a workload, and not only its study."""
    return "predicted" in results.get(workload.name, {})


def page(results: dict[str, Any]) -> str:
    """Return the page of the stored results, with a line break at its end."""
    results = {each.name: results[each.name] for each in WORKLOADS if is_measured(results, each)}
    return "\n".join(
        [
            "# Advice, every forecast beside what happened",
            "",
            "<!-- made by docs/advise_calibration.py from docs/advise-calibration.json -->",
            "",
            *_introduction(results),
            "## Against the targets",
            "",
            *_summary(results),
            "The workloads that miss one:",
            "",
            *_misses(results),
            "## What it costs to ask",
            "",
            *_costs(results),
            "## The recommendation",
            "",
            *_recommendations(results),
            "## Steps to the goal by batch size",
            "",
            *_curves(results),
        ]
    )


def _introduction(results: dict[str, Any]) -> list[str]:
    dates = sorted({result["date"] for result in results.values()})
    commits = sorted({result["commit"] for result in results.values()})
    machines = sorted({result["machine"] for result in results.values()})
    made = [", ".join(dates), "commits " + ", ".join(commits), "; ".join(machines)]
    studied = sorted({result["study_date"] for result in results.values()})
    return [
        f"This page has {len(results)} workloads of `configs/advice`. For each, an exhaustive "
        f"study tried {_rates_text(results)} at",
        "each batch size, and ran the best ones on fresh seeds. Of these, the one with the least "
        "median counts. `lit-dps advise` ran with its",
        "default method, in an empty folder, and `lit-dps fit` then ran its recommendation on seeds "
        "1, 2 and 3. Steps were then timed in three",
        "rounds over all batch sizes.",
        "",
        "Five settings were chosen after first results of these workloads: the limit of the cost, "
        "the largest distance of a run, the subtraction",
        "of the wait for a CPU, the correction of K for several learning rates, and that "
        "runs count by the time that they took and not by the",
        "model of the step time. Simulations and repeated timings decided the values. The numbers below may "
        "still be optimistic. Without the last setting, one",
        "workload cost 3.5 trainings, and the other targets were met (commit d3518b77). The studies "
        "were changed after results, too: with five to",
        "eight rates and only the best one repeated, the median error was 0.16, and the time lost "
        "was 14 % (commit e2cfa732).",
        "",
        "```bash",
        "python docs/advise_calibration.py measure        # runs all of this: advise, fit, missing studies",
        "python docs/advise_calibration.py studies NAME   # reads a study in mlruns again",
        "python docs/advise_calibration.py                # writes this page from advise-calibration.json",
        "```",
        "",
        f"Measured with one thread on {_machine_state(results)}: {', '.join(made)}.",
        f"The studies are of {', '.join(studied)}.",
        "",
    ]


def _rates_text(results: dict[str, Any]) -> str:
    """Return how many learning rates the studies tried: the usual number, and others by name."""
    usual = statistics.mode(result["rates"] for result in results.values())
    others = []
    for name, result in results.items():
        if result["rates"] != usual:
            others.append(f"{result['rates']} for `{name}`")
    text = f"{usual} learning rates"
    return f"{text} ({', '.join(others)})" if others else text


def _machine_state(results: dict[str, Any]) -> str:
    """Return whether other programs ran, by the wait for a CPU while steps were timed."""
    # Results of earlier versions lack the wait; other programs ran then.
    waited = max(result.get("waited", 1.0) for result in results.values())
    if waited > QUIET_SHARE:
        return "a machine that ran other programs"
    return f"a quiet machine (at most {waited:.0%} of the timed steps waited for a CPU)"


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    """Return a table in Markdown, with an empty line after it."""
    align = ["---"] + ["---:"] * (len(head) - 1)
    lines = [head, align, *rows]
    return [*("| " + " | ".join(cells) + " |" for cells in lines), ""]


def _verdict(is_met: bool) -> str:
    return "met" if is_met else "**missed**"


def _summary(results: dict[str, Any]) -> list[str]:
    """Return the targets, the values, and whether each is met."""
    within = sum(cost_in_trainings(each) <= each["announced"] for each in results.values())
    near = near_comparisons(results)
    error = statistics.median(abs(each.log_error) for each in near)
    covered = sum(each.is_covered for each in near) / len(near)
    answered = [each for each in results.values() if each["recommendation"] is not None]
    mean_loss = _mean(map(time_lost, answered))
    mean_by_law = _mean(time_lost(each, "by_law") for each in answered)
    mean_by_fit = _mean(map(time_lost_by_fit, answered))
    costs = [cost_in_trainings(result) for result in results.values()]
    low, high = COVERAGE_RANGE
    rows = [
        [
            f"cost: at most {MAX_TRAININGS[0]} trainings, {MAX_TRAININGS[1]} on a full device",
            f"{within} of {len(results)} workloads; median {statistics.median(costs):.1f}",
            _verdict(within == len(results)),
        ],
        [
            f"median error of log K to {FAR} B0: at most {MAX_ERROR}",
            f"{error:.2f} ({len(near)} batch sizes)",
            _verdict(error <= MAX_ERROR),
        ],
        [
            f"the 80 % interval of K contains the median over seeds: {low:.0%} to {high:.0%}",
            f"{covered:.0%}",
            _verdict(low <= covered <= high),
        ],
        [
            f"mean time lost by the recommendation: at most {MAX_TIME_LOST:.0%}",
            f"{mean_loss:.0%} ({len(answered)} of {len(results)} workloads); by the law "
            f"{mean_by_law:.0%}, by `fit` {mean_by_fit:.0%}",
            _verdict(mean_loss <= MAX_TIME_LOST),
        ],
    ]
    lines = _table(["target", "result", ""], rows)
    lines += [
        f"A median over seeds has a standard error of about {median_scatter(results):.0%}, and the "
        "least of some noisy times is too small. Both",
        "increase these errors. Steps are multiples of the check interval: where K is "
        "three checks, one check changes the time by a third.",
        "The batch size that is fastest by c1 / B + c2 through all medians of the study loses "
        f"{_mean(map(time_lost_by_study, results.values())):.0%} on average.",
        "No advice knows these medians.",
        f"The median log error is {_median_error(near, 0, 1):+.2f} up to B0 and "
        f"{_median_error(near, 1, FAR):+.2f} above it. K at B0 has the user's rate, and the study "
        "has the best one. So part of the first error is expected.",
        "",
    ]
    return lines


def _mean(values: Iterable[float | None]) -> float:
    """Return the mean of the known values."""
    return statistics.mean(value for value in values if value is not None)


def _median_error(rows: list[Comparison], above: float, most: float) -> float:
    """Return the median log error at batch sizes in a range (above, most] over B0."""
    return statistics.median(each.log_error for each in rows if above < each.ratio <= most)


def median_scatter(results: dict[str, Any]) -> float:
    """Return the standard error of a median over seeds, as a share: the median over batch sizes.

    The spread of log K is that of a normal distribution with the same quartiles.
    """
    errors = []
    for result in results.values():
        for row in result["exhaustive"]:
            if row["upper"] is not None:
                spread = math.log(row["upper"] / row["lower"]) / QUARTILES
                errors.append(MEDIAN_ERROR * spread / math.sqrt(row["runs"]))
    return statistics.median(errors)


def _misses(results: dict[str, Any]) -> list[str]:
    """Return which workloads miss a target, a line each."""
    dear = []
    slow = []
    wide = []
    outside = []
    for name, result in results.items():
        cost = cost_in_trainings(result)
        if cost > result["announced"]:
            dear.append(f"`{name}` ({cost:.2f} of {result['announced']:g} trainings)")
        lost = time_lost(result)
        if lost is not None and lost > MAX_TIME_LOST:
            slow.append(f"`{name}` ({lost:.0%})")
        errors = [abs(each.log_error) for each in comparisons(result) if each.ratio <= FAR]
        if errors and statistics.median(errors) > MAX_ERROR:
            wide.append(f"`{name}` ({statistics.median(errors):.2f})")
        count = sum(not is_within_limits(run) for run in result["fit"])
        if count:
            outside.append(f"`{name}` ({count} of {len(result['fit'])})")
    return [
        f"- Runs beyond the announced cost: {', '.join(dear) or 'none'}.",
        f"- More than {MAX_TIME_LOST:.0%} of the time lost: {', '.join(slow) or 'none'}.",
        f"- Median error of log K above {MAX_ERROR}: {', '.join(wide) or 'none'}.",
        f"- Runs of `fit` outside of the 95 % limits in steps: {', '.join(outside) or 'none'}.",
        "",
    ]


def is_within_limits(run: dict[str, Any]) -> bool:
    """Return True if a run of `fit` met the goal within the predicted 95 % limits in steps."""
    low, _, high = run["predicted_steps"]
    return run["reached"] and low <= run["steps"] <= high


def _costs(results: dict[str, Any]) -> list[str]:
    rows = []
    for name, result in results.items():
        pilot = result["pilot"]
        sizes = sorted({run[0] for run in result["runs"]} - {result["pilot_size"]})
        cost = cost_in_trainings(result)
        rows.append(
            [
                _what(name),
                f"B = {result['pilot_size']}, {pilot['steps_run']} steps",
                f"{result['training_seconds']:.1f} s",
                ", ".join(map(str, sizes)) or "none",
                f"{result['announced']:g}",
                f"{cost:.2f}",
                f"{sum(run[3] for run in result['runs']) / result['training_seconds']:.2f}",
                f"{result['seconds']:.0f} s",
                f"{result['seconds'] / result['training_seconds']:.1f}",
            ]
        )
    rest = [
        result["seconds"] - sum(run[3] for run in result["runs"]) for result in results.values()
    ]
    head = ["workload", "your run", "in `fit`", "further runs at B", "announced, in trainings"]
    head += ["device time of the runs", "wall time of the runs", "whole command", "in trainings"]
    lines = _table(head, rows)
    lines += [
        "A training is the user's run to the goal, as `fit` does it: without readings, and with "
        "full validations. Both times include",
        "this run with its start and its readings. Of further runs, device time has the steps and "
        "validations. Wall time also has the start of",
        "each run, which loads the data. The rest of the command (imports, the timing of "
        f"steps, figures) took {min(rest):.0f} to {max(rest):.0f} s.",
        "",
    ]
    return lines


def _recommendations(results: dict[str, Any]) -> list[str]:
    rows = []
    for name, result in results.items():
        times = times_to_goal(result)
        best = min(times, key=lambda size: times[size])
        row = [_what(name), "none", str(best), "-", "-", "-", "-", "-", "-"]
        if result["recommendation"] is not None:
            lost = time_lost(result)
            steps = result["recommendation"]["steps"]
            real = [_steps_of_fit(run) for run in result["fit"]]
            hours = statistics.median(run["hours"] for run in result["fit"])
            row[1] = str(result["recommendation"]["batch_size"])
            by_law = time_lost(result, "by_law")
            is_in_study = result["recommendation"]["batch_size"] in times
            row[3] = f"{lost:.0%}" if is_in_study else f"{lost:.0%} by `fit`"
            row[4] = f"{by_law:.0%}"
            by_fit = time_lost_by_fit(result)
            row[5] = "missed" if by_fit is None else f"{by_fit:.0%}"
            row[6] = f"{steps['value']:.3g} [{steps['low']:.3g}, {steps['high']:.3g}]"
            row[7] = ", ".join(real)
            row[8] = f"{hours / result['recommendation']['hours']['value']:.2f}"
        rows.append(row)
    head = ["workload", "recommended B", "fastest B of the study", "time lost", "by the law"]
    head += ["by `fit`", "predicted steps", "`fit`, seeds 1, 2, 3", "real / predicted hours"]
    lines = _table(head, rows)
    runs = [run for result in results.values() for run in result["fit"]]
    inside = sum(is_within_limits(run) for run in runs)
    lines += [
        f"{inside} of {len(runs)} runs of `fit` are within the 95 % limits in steps. Limits are in "
        "brackets. The time of a batch size is its",
        "median steps times the seconds of a step with its checks. Time lost is the time of the "
        "recommended batch size over the least time,",
        "minus 1. Without a median at the recommended batch size, its steps are those of `fit`. By "
        "the law, steps are c1 / B + c2 through all",
        "medians. By `fit`, they are the median of the three runs, which use the recommended rate.",
        "",
    ]
    return lines


def _steps_of_fit(run: dict[str, Any]) -> str:
    if run["reached"]:
        return str(run["steps"])
    return f"missed ({run['steps']})"


def _curves(results: dict[str, Any]) -> list[str]:
    rows = []
    for name, result in results.items():
        for each in comparisons(result):
            of_seeds = f"{each.median:.4g}"
            if each.least is not None:
                most = "missed" if each.most is None else f"{each.most:.4g}"
                of_seeds += f" ({each.least:.4g} to {most})"
            rows.append(
                [
                    _what(name),
                    str(each.batch_size),
                    f"{each.ratio:g}",
                    f"{each.predicted:.3g} [{each.low:.3g}, {each.high:.3g}]",
                    of_seeds,
                    f"{each.log_error:+.2f}",
                    "yes" if each.is_covered else "no",
                ]
            )
    head = ["workload", "B", "B / B0", "predicted K [80 %]", "median over seeds (all)"]
    lines = _table([*head, "log error", "in the interval"], rows)
    lines += [
        "A batch size is left out if most runs of the study missed the goal within twice the least "
        "steps of its trials.",
        "",
    ]
    return lines


def _what(name: str) -> str:
    (workload,) = [each for each in WORKLOADS if each.name == name]
    return f"`{name}`: {workload.what}"


def main(arguments: list[str]) -> None:
    mode, *names = arguments or [""]
    if mode == "measure":
        from advise_measuring import measure

        measure(names)
    elif mode == "studies":
        from advise_measuring import read_studies

        read_studies(names)
    PAGE.write_text(page(read_results()))


if __name__ == "__main__":
    main(sys.argv[1:])
