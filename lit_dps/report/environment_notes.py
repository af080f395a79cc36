"""Notes on trials of one table that were made of different code, data, versions, threads or
loops."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from lit_dps.core.environment import DATA, KEY, SINCE, SOURCES, THREADS, UNKNOWN, versions_of
from lit_dps.core.record import StudyRecord
from lit_dps.core.trial import LIGHTNING, TrialResult

TORCH = "version.torch"
# Packages, beside torch and those of the user's classes, that decide results
PACKAGES = ("version.lit_dps", "version.lightning", "version.numpy")
# Packages that only search, store or show
NO_RESULTS = ("version.optuna", "version.mlflow", "version.scipy")


def environment_notes(record: StudyRecord) -> list[str]:
    """Return a line for each kind of difference between the environments of a study's trials."""
    results = [
        result
        for cell in (record.results, record.repeats)
        for some in cell.values()
        for result in some
    ]
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


def _torch_notes(environments: Sequence[Mapping[str, Any]]) -> list[str]:
    """A seed is a promise of one version alone: `nn.init.trunc_normal_` draws otherwise in 2.15
    than in 2.11."""
    versions = dict.fromkeys(each[TORCH] for each in environments if TORCH in each)
    if len(versions) < 2:
        return []
    return [
        f"trials ran under torch {' and '.join(versions)}: there a seed may draw other initial "
        "weights, so that trials "
        "of one point need not share theirs"
    ]


def _version_notes(used: Sequence[Mapping[str, Any]]) -> list[str]:
    names = dict.fromkeys(PACKAGES)
    for environment in used:
        names |= dict.fromkeys(key for key in environment if key.startswith("version."))
    differing = []
    for name in names:
        versions = dict.fromkeys(each[name] for each in used if name in each)
        if len(versions) > 1 and name not in (TORCH, *NO_RESULTS):
            differing.append(f"{name.removeprefix('version.')} {' and '.join(versions)}")
    if not differing:
        return []
    return [f"trials ran under {'; '.join(differing)}: results may differ between these versions"]


def _part_notes(used: Sequence[Mapping[str, Any]], counts: Mapping[str | None, int]) -> list[str]:
    """That trials ran with several versions of a file of the user's code, or of the data."""
    lines = []
    for entry in (SOURCES, DATA):
        names = dict.fromkeys(name for each in used for name in each.get(entry, {}))
        for name in names:
            versions = versions_of(used, entry, name)
            if len(versions) < 2:
                continue
            listed = []
            for environments in versions:
                trials = sum(counts[each[KEY]] for each in environments)
                listed.append(f"{_trials(trials)} since {environments[0][SINCE]}")
            lines.append(
                f"trials of {len(versions)} versions of {_called(entry, name)} are in this table: "
                f"{', '.join(listed)}"
            )
    return lines


def _called(entry: str, name: str) -> str:
    if entry == SOURCES:
        return name
    return f"the data at {name}" if name else "the data"


def _unknown_notes(
    used: Sequence[Mapping[str, Any]], counts: Mapping[str | None, int]
) -> list[str]:
    lines = []
    if counts[None] and used:
        lines.append(
            f"code and data of {_trials(counts[None])} are not on record, which an earlier "
            "version ran; those of the "
            f"others are, since {used[0][SINCE]}"
        )
    unknown = {
        name
        for each in used
        for name, hashes in each.get(SOURCES, {}).items()
        if list(hashes) == UNKNOWN
    }
    if unknown:
        lines.append(
            f"the code of {', '.join(sorted(unknown))} is not on record: its source cannot be read"
        )
    return lines


def _thread_notes(used: Sequence[Mapping[str, Any]]) -> list[str]:
    threads = sorted({each[THREADS] for each in used if THREADS in each})
    if len(threads) < 2:
        return []
    listed = " and ".join(map(str, threads))
    return [
        f"trials ran with study.threads {listed}: steps take other times, and results may differ "
        "in the last digit"
    ]


def _engine_notes(results: Sequence[TrialResult]) -> list[str]:
    engines = Counter(result.engine for result in results if result.engine)
    if LIGHTNING not in engines or len(engines) < 2:
        return []
    others = ", ".join(
        f"{count} by the {engine}"
        for engine, count in sorted(engines.items())
        if engine != LIGHTNING
    )
    return [
        f"{_trials(engines[LIGHTNING])} ran in Lightning's loop, {others}: a step of Lightning's "
        "loop takes longer, so "
        "compare step times of one loop alone"
    ]


def _trials(count: int) -> str:
    return "1 trial" if count == 1 else f"{count} trials"
