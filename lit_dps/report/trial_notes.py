"""Notes on the trials of a study: how they ended, how they were trained, in what they differ.

Counts are of all finished trials together; "up to" is the largest value of any single trial. Trials
of one table may differ in code, data, versions, threads or training loop.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import lit_dps.core.trial as flags
from lit_dps.analysis.analysis import Analysis
from lit_dps.core.environment import (
    COMPUTED,
    DATA,
    KEY,
    SINCE,
    SOURCES,
    THREADS,
    UNKNOWN,
    is_comparable,
    versions_of,
)
from lit_dps.core.text import counted
from lit_dps.core.trial import Status, TrialResult
from lit_dps.report.notes import (
    Level,
    Note,
    Values,
    count_trials,
    finished_trials,
    first_names,
    percent,
    were,
)

# A goal that is met within this share of the schedule sees almost no decay of the rate.
EARLY_SHARE = 0.1

VERSION = "version."
# Packages that decide results, beside the packages of the user's classes. With another version of
# torch, a seed may draw other weights: `nn.init.trunc_normal_` does in 2.15, compared with 2.11.
PACKAGES = ("version.torch", "version.lit_dps", "version.lightning", "version.numpy")
# Packages that only search, store or display.
NO_RESULTS = ("version.optuna", "version.mlflow", "version.scipy")
Environment = Mapping[str, Any]


def failed_trials(study: Analysis) -> Iterator[Values]:
    """Yield the causes of trials that ended with an error, if there are any."""
    failed = _with_status(study, Status.FAILED)
    if not failed:
        return
    causes = []
    for result in failed:
        causes.append(f"{result.trial.cell} sample {result.trial.point}: {first_line(result)}")
    again = "run again"
    if len(failed) == 1:
        again = "runs again"
    yield {"trials": count_trials(failed), "causes": "; ".join(first_names(causes)), "again": again}


def stopped_trials(study: Analysis) -> Iterator[Values]:
    """Yield the first reason of trials that their module or a callback ended."""
    stopped = _with_status(study, Status.STOPPED)
    if stopped:
        yield {"trials_were": were(stopped), "reason": first_line(stopped[0])}


def _with_status(study: Analysis, status: Status) -> list[TrialResult]:
    """Return the finished trials of a status."""
    return [result for result in finished_trials(study) if result.status is status]


def validations_without_value(study: Analysis) -> Iterator[Values]:
    """Yield validations whose metric was not finite in a run that had not diverged."""
    first = 0
    later = 0
    kinds: set[str] = set()
    for result in finished_trials(study):
        values = values_not_finite(result, study)
        for value in values.values():
            kinds.add("NaN" if math.isnan(value) else "infinite")
        if 0 in values:
            first += 1
        elif values:
            later += 1
    places = []
    if first:
        places.append("at the first validation of " + counted(first, "trial"))
    if later:
        places.append("at a later validation of " + counted(later, "trial"))
    if places:
        yield {
            "metric": study.record.goal.metric,
            "kinds": " or ".join(sorted(kinds)),
            "places": " and ".join(places),
        }


def values_not_finite(result: TrialResult, study: Analysis) -> dict[int, float]:
    """Return metric values that are not finite by validation, without the one of a divergence."""
    goal = study.record.goal
    values = list(result.curve.get(goal.metric, ()))
    continued = result.steps is not None and result.steps_run > result.steps
    diverged_later = continued and not goal.is_spent(result.curve)
    if result.status is Status.INFEASIBLE or diverged_later:
        # The weights may be what was not finite at the last validation; the curve cannot show it.
        values = values[:-1]
    return {i: value for i, value in enumerate(values) if not math.isfinite(value)}


def share_of_steps(study: Analysis, flag: str) -> Iterator[Values]:
    """Yield in how many trials some steps have a flag, and the largest share of a trial's steps."""
    results = with_flag(study, flag)
    if results:
        share = 0.0
        for result in results:
            share = max(share, result.flags[flag] / max(result.steps_run, 1))
        yield {
            "count": len(results),
            "trials": count_trials(finished_trials(study)),
            "share": percent(share),
        }


def peaks_of_process(study: Analysis) -> Iterator[Values]:
    """Yield the number of trials whose peak memory includes earlier trials, if there are any."""
    results = with_flag(study, flags.PEAK_OF_PROCESS)
    if results:
        yield {"trials_were": were(results)}


def within_warm_up(study: Analysis) -> Iterator[Values]:
    """Yield cells whose goal is met within the warm-up of the learning rate."""
    cells = []
    for cell, k_star, warm_up, _ in _schedules(study):
        if k_star <= warm_up:
            cells.append(f"{cell} (step {k_star:g} of {warm_up})")
    if cells:
        yield {"cells": "; ".join(first_names(cells))}


def early_in_schedule(study: Analysis) -> Iterator[Values]:
    """Yield cells whose goal is met early in the schedule, after the warm-up."""
    cells = []
    for cell, k_star, warm_up, length in _schedules(study):
        if warm_up < k_star < EARLY_SHARE * length and length > warm_up + 1:
            cells.append(f"{cell} ({percent(k_star / length)} of {length} steps)")
    if cells:
        yield {"cells": "; ".join(first_names(cells))}


def _schedules(study: Analysis) -> Iterator[tuple[str, float, int, int]]:
    """Yield cell, K* in steps, warm-up and length of the schedule of each K* trial with one."""
    for cell in study.cells:
        k_star = cell.k_star_steps
        if cell.best is not None and k_star is not None and flags.SCHEDULE in cell.best.flags:
            of_best = cell.best.flags
            yield str(cell.cell), k_star, int(of_best[flags.WARM_UP]), int(of_best[flags.SCHEDULE])


def warm_up_notes(results: Sequence[TrialResult], k_of: Mapping[int, float]) -> list[str]:
    """Return a note on batch sizes whose predicted K is not larger than the warm-up of the rate.

    Args:
        results: Trials of the study; nothing is noted where their warm-ups differ.
        k_of: Predicted K by batch size.
    """
    warm_ups = {result.flags[flags.WARM_UP] for result in results if flags.WARM_UP in result.flags}
    if len(warm_ups) != 1:
        return []
    warm_up = warm_ups.pop()
    shorter = [size for size, k in sorted(k_of.items()) if k <= warm_up]
    if not shorter:
        return []
    sizes = f"B = {shorter[0]}"
    if len(shorter) > 1:
        sizes = f"B = {shorter[0]} to {shorter[-1]}"
    return [
        f"At {sizes} your warm-up of {warm_up:g} steps is longer than K, so the goal would be met "
        "while the rate still grows. Shorten the warm-up there."
    ]


def with_flag(study: Analysis, flag: str) -> list[TrialResult]:
    """Return the finished trials for which a count or flag was observed."""
    return [result for result in finished_trials(study) if result.flags.get(flag)]


def first_line(result: TrialResult) -> str:
    """Return the first line of the reason why a trial ended."""
    lines = result.failure.strip().splitlines()
    if not lines:
        return "no reason stored"
    return lines[0]


FAILURES = (
    Note(
        failed_trials,
        "{trials} failed and {again} when the study is resumed: {causes}.",
        level=Level.WRONG,
    ),
    Note(
        stopped_trials,
        "{trials_were} stopped by the module or a callback before the goal and the end of the "
        "budget, so K* depends on it: {reason}",
        level=Level.WEAK,
    ),
    Note(
        validations_without_value,
        "{metric} was {kinds} {places}, although the loss was finite: correct what the module "
        "logs.",
        "Such a validation does not meet the goal, and the trial continues.",
        Level.WEAK,
    ),
    Note(
        partial(share_of_steps, flag=flags.SHORT_STEPS),
        "Some steps had fewer than B examples in {count} of {trials}: set drop_last or use an "
        "endless loader.",
        "They are up to {share} of a trial's steps, at the end of an epoch or of a length class.",
        Level.WEAK,
    ),
    Note(
        partial(share_of_steps, flag=flags.UNCOUNTED_STEPS),
        "The number of examples is unknown for some steps of {count} of {trials}: use a DataLoader "
        "with a sampler.",
        "They are up to {share} of a trial's steps. B is the configured batch size there.",
        Level.WEAK,
    ),
)

ENGINES = (
    Note(
        peaks_of_process,
        "{trials_were} measured with the peak memory since the process began, which includes "
        "earlier trials. This system cannot reset it.",
    ),
)

SCHEDULES = (
    Note(
        within_warm_up,
        "The goal is met within the warm-up of the learning rate at {cells}: make the warm-up "
        "shorter than K*.",
        "The rate still grew there, so K* cannot be compared between batch sizes.",
        Level.WRONG,
    ),
    Note(
        early_in_schedule,
        "K* is early in the schedule of the learning rate at {cells}: lower goal.max_steps or "
        "shorten the schedule.",
        "The decay had no effect. A schedule that ends near the goal has another K*.",
        Level.WEAK,
    ),
)


def trials_and_repeats(study: Analysis) -> list[TrialResult]:
    """Return all finished trials of a study, and its repeats."""
    results = finished_trials(study)
    for cell in study.record.trained_cells:
        results += study.record.repeats.get(cell, ())
    return results


def used_environments(study: Analysis) -> list[Environment]:
    """Return the environments that a trial or repeat ran in."""
    counts = _count_environments(study)
    return [each for each in study.record.environments if counts[each.get(KEY, "")]]


def _count_environments(study: Analysis) -> Counter:
    """Return the number of trials and repeats of each environment, by key; None if unknown."""
    return Counter(result.environment for result in trials_and_repeats(study))


def package_versions(study: Analysis) -> Iterator[Values]:
    """Yield several versions of packages that may change results."""
    environments = used_environments(study)
    if None in _count_environments(study):  # trials of an earlier version name no environment
        environments = list(study.record.environments)
    names: list[str] = list(PACKAGES)
    for environment in environments:
        names.extend(environment)
    differing = []
    for name in dict.fromkeys(names):
        if not name.startswith(VERSION) or name in NO_RESULTS:
            continue
        versions = _versions(environments, name)
        if len(versions) > 1:
            differing.append(f"{name.removeprefix(VERSION)} {' and '.join(versions)}")
    if differing:
        yield {"packages": "; ".join(differing)}


def _versions(environments: Sequence[Environment], name: str) -> list[str]:
    """Return the versions of a package, without duplicates, in the order of the environments."""
    versions = {}
    for environment in environments:
        if name in environment:
            versions[environment[name]] = None
    return list(versions)


def versions_of_parts(study: Analysis) -> Iterator[Values]:
    """Yield each file of the user's code, or of the data, that has several versions."""
    used = used_environments(study)
    counts = _count_environments(study)
    for entry in (SOURCES, DATA, COMPUTED):
        names: dict[str, None] = {}
        for environment in used:
            names |= dict.fromkeys(environment.get(entry, {}))
        for name in names:
            versions = versions_of(used, entry, name)
            if len(versions) < 2:
                continue
            trials = []
            for environments in versions:
                number = sum(counts[each[KEY]] for each in environments)
                trials.append(f"{counted(number, 'trial')} since {environments[0][SINCE]}")
            yield {
                "versions": len(versions),
                "part": _part_name(entry, name),
                "trials": ", ".join(trials),
            }


def _part_name(entry: str, name: str) -> str:
    """Return a file of the code, or the data, in words."""
    if entry == SOURCES:
        return name
    if entry == COMPUTED:
        return f"the {name} of the first steps"
    if not name:
        return "the data"
    return f"the data at {name}"


def unknown_environments(study: Analysis) -> Iterator[Values]:
    """Yield trials whose code and data are not recorded, if other trials have such a record."""
    used = used_environments(study)
    trials = _count_environments(study)[None]
    if trials and used:
        yield {"trials": counted(trials, "trial"), "since": used[0][SINCE]}


def unknown_code(study: Analysis) -> Iterator[Values]:
    """Yield values of the script that cannot be compared.

    The hashes of another version of lit_dps, or of byte code of another Python, cannot be compared
    either.
    """
    names = set()
    first: dict[str, Sequence[str]] = {}
    for environment in used_environments(study):
        for name, hashes in environment.get(SOURCES, {}).items():
            if list(hashes) == UNKNOWN:
                names.add(name)
                continue
            if not is_comparable(first.setdefault(name, hashes), hashes):
                names.add(f"{name} (with another version of lit_dps or Python)")
    if names:
        yield {"names": ", ".join(sorted(names))}


def thread_counts(study: Analysis) -> Iterator[Values]:
    """Yield several numbers of threads."""
    threads = sorted(_versions(used_environments(study), THREADS))
    if len(threads) > 1:
        yield {"threads": " and ".join(map(str, threads))}


def training_loops(study: Analysis) -> Iterator[Values]:
    """Yield trials of Lightning's loop beside trials of other loops."""
    engines = Counter(result.engine for result in trials_and_repeats(study))
    engines.pop("", None)  # of trials of an earlier version
    lightning = engines.pop(flags.LIGHTNING, 0)
    if lightning and engines:
        others = [f"{number} in the loop {engine}" for engine, number in sorted(engines.items())]
        yield {"trials": counted(lightning, "trial"), "others": ", ".join(others)}


ENVIRONMENTS = (
    Note(
        package_versions,
        "Trials ran under {packages}: compare cells only within one version.",
        "Results may differ between these versions. A seed may draw other initial weights.",
        Level.WEAK,
    ),
    Note(
        versions_of_parts,
        "Trials of {versions} versions of {part} are in this table: start a new study to separate "
        "them.",
        "They are {trials}.",
        Level.WRONG,
    ),
    Note(
        unknown_environments,
        "Code and data of {trials} are not recorded, since an earlier version ran them. Code and "
        "data of the other trials are, since {since}.",
    ),
    Note(
        unknown_code,
        "lit_dps cannot compare {names} between runs, and does not notice if they change.",
    ),
    Note(
        thread_counts,
        "Trials ran with study.threads {threads}: do not compare their step times.",
        "Results may differ in the last digit.",
        Level.WEAK,
    ),
    Note(
        training_loops,
        "{trials} ran in Lightning's own loop, {others}: compare step times of one loop only.",
        "A step of Lightning's loop takes longer.",
        Level.WEAK,
    ),
)
