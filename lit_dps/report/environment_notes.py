"""Notes on trials of one table that differ in code, data, versions, threads or training loop."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lit_dps.core.environment import DATA, KEY, SINCE, SOURCES, THREADS, UNKNOWN, versions_of
from lit_dps.core.record import StudyRecord
from lit_dps.core.trial import ENGINE_SET, LIGHTNING, TrialResult
from lit_dps.report.trial_notes import count_of

VERSION = "version."
TORCH = "version.torch"
# Packages that decide results, beside torch and those of the user's classes.
PACKAGES = ("version.lit_dps", "version.lightning", "version.numpy")
# Packages that only search, store or display.
NO_RESULTS = ("version.optuna", "version.mlflow", "version.scipy")

Environment = Mapping[str, Any]


def environment_notes(record: StudyRecord) -> list[str]:
    """Return a line for each kind of difference between the environments of a study's trials."""
    results: list[TrialResult] = []
    for by_cell in (record.results, record.repeats):
        for of_cell in by_cell.values():
            results += of_cell
    counts = Counter(result.environment for result in results)
    used = [each for each in record.environments if counts[each.get(KEY, "")]]
    return [
        *_torch_notes(record.environments),
        *_version_notes(used),
        *_part_notes(used, counts),
        *_unknown_notes(used, counts),
        *_thread_notes(used),
        *_engine_notes(results),
    ]


def _torch_notes(environments: Sequence[Environment]) -> Iterator[str]:
    """Note several versions of torch.

    Random numbers of a seed depend on the version: `nn.init.trunc_normal_` draws others in 2.15
    than in 2.11.
    """
    versions = _versions(environments, TORCH)
    if len(versions) > 1:
        yield (
            f"Trials ran under torch {' and '.join(versions)}. A seed may draw other initial "
            "weights there, so trials of one sample may start from different weights."
        )


def _version_notes(used: Sequence[Environment]) -> Iterator[str]:
    """Note several versions of other packages that may change results."""
    names = list(PACKAGES)
    for environment in used:
        names += [key for key in environment if key.startswith(VERSION)]
    differing = []
    for name in dict.fromkeys(names):
        versions = _versions(used, name)
        if len(versions) > 1 and name != TORCH and name not in NO_RESULTS:
            differing.append(f"{name.removeprefix(VERSION)} {' and '.join(versions)}")
    if differing:
        yield (
            f"Trials ran under {'; '.join(differing)}. Results may differ between these versions."
        )


def _versions(environments: Sequence[Environment], name: str) -> list[str]:
    """Return the versions of a package, without duplicates, in the order of the environments."""
    return list(dict.fromkeys(each[name] for each in environments if name in each))


def _part_notes(used: Sequence[Environment], counts: Mapping[str | None, int]) -> Iterator[str]:
    """Note several versions of a file of the user's code, or of the data."""
    for entry in (SOURCES, DATA):
        names = dict.fromkeys(name for each in used for name in each.get(entry, {}))
        for name in names:
            versions = versions_of(used, entry, name)
            if len(versions) < 2:
                continue
            listed = []
            for environments in versions:
                trials = sum(counts[each[KEY]] for each in environments)
                listed.append(f"{count_of(trials)} since {environments[0][SINCE]}")
            yield (
                f"Trials of {len(versions)} versions of {_part_name(entry, name)} are in this "
                f"table: {', '.join(listed)}."
            )


def _part_name(entry: str, name: str) -> str:
    if entry == SOURCES:
        return name
    return f"the data at {name}" if name else "the data"


def _unknown_notes(used: Sequence[Environment], counts: Mapping[str | None, int]) -> Iterator[str]:
    """Note trials and classes whose code is not recorded."""
    if counts[None] and used:
        yield (
            f"Code and data of {count_of(counts[None])} are not recorded, since an earlier version "
            f"ran them. Those of the other trials are, since {used[0][SINCE]}."
        )
    unknown = set()
    for environment in used:
        for name, hashes in environment.get(SOURCES, {}).items():
            if list(hashes) == UNKNOWN:
                unknown.add(name)
    if unknown:
        yield (
            f"The code of {', '.join(sorted(unknown))} is not recorded: its source cannot be read."
        )


def _thread_notes(used: Sequence[Environment]) -> Iterator[str]:
    """Note several numbers of threads."""
    threads = sorted({each[THREADS] for each in used if THREADS in each})
    if len(threads) > 1:
        yield (
            f"Trials ran with study.threads {' and '.join(map(str, threads))}. Their step times "
            "cannot be compared, and results may differ in the last digit."
        )


def _engine_notes(results: Sequence[TrialResult]) -> Iterator[str]:
    """Note trials of Lightning's own loop beside trials of other loops, and why it was needed."""
    engines = Counter(result.engine for result in results if result.engine)
    lightning = engines.pop(LIGHTNING, 0)
    if lightning and engines:
        others = ", ".join(f"{count} in the loop {name}" for name, count in sorted(engines.items()))
        yield (
            f"{count_of(lightning)} ran in Lightning's own loop, {others}. A step of Lightning's "
            "loop takes longer, so compare step times of one loop only."
        )
    reasons = Counter(r.engine_reason for r in results if r.engine_reason not in ("", ENGINE_SET))
    for reason, count in reasons.most_common():
        yield f"{count_of(count)} did not run in the fastest loop, because {reason}."
