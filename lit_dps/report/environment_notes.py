"""Notes on trials of one table that differ in code, data, versions, threads or training loop."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lit_dps.analysis.analysis import Analysis
from lit_dps.core.environment import DATA, KEY, SINCE, SOURCES, THREADS, UNKNOWN, versions_of
from lit_dps.core.trial import ENGINE_SET, LIGHTNING, TrialResult
from lit_dps.report.notes import Note, Values, count_of, finished_trials

VERSION = "version."
TORCH = "version.torch"
# Packages that decide results, beside torch and the packages of the user's classes.
PACKAGES = ("version.lit_dps", "version.lightning", "version.numpy")
# Packages that only search, store or display.
NO_RESULTS = ("version.optuna", "version.mlflow", "version.scipy")

Environment = Mapping[str, Any]


def trials_and_repeats(study: Analysis) -> list[TrialResult]:
    """Return all finished trials of a study, and its repeats."""
    results = finished_trials(study)
    for of_cell in study.record.repeats.values():
        results += of_cell
    return results


def used_environments(study: Analysis) -> list[Environment]:
    """Return the environments that a trial or repeat ran in."""
    counts = _count_environments(study)
    return [each for each in study.record.environments if counts[each.get(KEY, "")]]


def _count_environments(study: Analysis) -> Counter:
    """Return the number of trials and repeats of each environment, by key; None if unknown."""
    return Counter(result.environment for result in trials_and_repeats(study))


def torch_versions(study: Analysis) -> Iterator[Values]:
    """Yield several versions of torch.

    Random numbers of a seed depend on the version: `nn.init.trunc_normal_` draws others in 2.15
    than in 2.11.
    """
    versions = _versions(study.record.environments, TORCH)
    if len(versions) > 1:
        yield {"versions": " and ".join(versions)}


def package_versions(study: Analysis) -> Iterator[Values]:
    """Yield several versions of other packages that may change results."""
    used = used_environments(study)
    names: list[str] = list(PACKAGES)
    for environment in used:
        names.extend(environment)
    differing = []
    for name in dict.fromkeys(names):
        if not name.startswith(VERSION) or name == TORCH or name in NO_RESULTS:
            continue
        versions = _versions(used, name)
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
    for entry in (SOURCES, DATA):
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
                trials.append(f"{count_of(number)} since {environments[0][SINCE]}")
            yield {
                "versions": len(versions),
                "part": _part_name(entry, name),
                "trials": ", ".join(trials),
            }


def _part_name(entry: str, name: str) -> str:
    """Return a file of the code, or the data, in words."""
    if entry == SOURCES:
        return name
    if not name:
        return "the data"
    return f"the data at {name}"


def unknown_environments(study: Analysis) -> Iterator[Values]:
    """Yield trials whose code and data are not recorded, if other trials have such a record."""
    used = used_environments(study)
    trials = _count_environments(study)[None]
    if trials and used:
        yield {"trials": count_of(trials), "since": used[0][SINCE]}


def unknown_code(study: Analysis) -> Iterator[Values]:
    """Yield classes whose source cannot be read."""
    names = set()
    for environment in used_environments(study):
        for name, hashes in environment.get(SOURCES, {}).items():
            if list(hashes) == UNKNOWN:
                names.add(name)
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
    lightning = engines.pop(LIGHTNING, 0)
    if lightning and engines:
        others = [f"{number} in the loop {engine}" for engine, number in sorted(engines.items())]
        yield {"trials": count_of(lightning), "others": ", ".join(others)}


def slower_loops(study: Analysis) -> Iterator[Values]:
    """Yield each reason why trials did not run in the fastest loop."""
    reasons = Counter(result.engine_reason for result in trials_and_repeats(study))
    for reason, number in reasons.most_common():
        if reason not in ("", ENGINE_SET):
            yield {"trials": count_of(number), "reason": reason}


ENVIRONMENTS = (
    Note(
        torch_versions,
        "Trials ran under torch {versions}. A seed may draw other initial weights there, so trials "
        "of one sample may start from different weights.",
    ),
    Note(
        package_versions,
        "Trials ran under {packages}. Results may differ between these versions.",
    ),
    Note(
        versions_of_parts,
        "Trials of {versions} versions of {part} are in this table: {trials}.",
    ),
    Note(
        unknown_environments,
        "Code and data of {trials} are not recorded, since an earlier version ran them. Code and "
        "data of the other trials are, since {since}.",
    ),
    Note(unknown_code, "The code of {names} is not recorded: its source cannot be read."),
    Note(
        thread_counts,
        "Trials ran with study.threads {threads}. Their step times cannot be compared, and results "
        "may differ in the last digit.",
    ),
    Note(
        training_loops,
        "{trials} ran in Lightning's own loop, {others}. A step of Lightning's loop takes longer, "
        "so compare step times of one loop only.",
    ),
    Note(slower_loops, "{trials} did not run in the fastest loop, because {reason}."),
)
