"""Decides which process writes the analysis, and releases trials of processes that do not
answer."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from dataclasses import dataclass

import optuna
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState

from lit_dps.core.text import counted
from lit_dps.storage.cells import end_interrupted
from lit_dps.storage.database import storage_errors, temporary_storage
from lit_dps.storage.locks import Liveness, describe_owner, peers
from lit_dps.storage.schema import OWNER, REPORTED, RESULT_ATTR
from lit_dps.storage.stored_format import read_header

TAKE_OVER = "--take-over"


@dataclass(frozen=True)
class ReportDeferred:
    """Why another process writes the analysis.

    Attributes:
        reason: One line for the user.
        is_running: Whether other processes still run trials, so that the study is incomplete.
    """

    reason: str
    is_running: bool


def results_reported(url: str, name: str) -> int | None:
    """Return the number of results in the last analysis of a study; None without an analysis.

    Raises:
        StorageError: if the storage cannot be used.
    """
    with storage_errors(url), temporary_storage(url) as storage:
        return read_header(storage, name).get(REPORTED)


def claim_report(url: str, name: str, reported_before: int | None = None) -> ReportDeferred | None:
    """Return why another process writes the analysis; None if this process has to write it.

    If several processes work on a study, the last one to finish writes the analysis, once.

    Args:
        url: Optuna storage URL.
        name: The study's name.
        reported_before: The number of results in the analysis that existed when this run began
            (`results_reported`). If it is still the last analysis, no other process writes one.

    Raises:
        StorageError: if the storage cannot be used.
    """
    shared = peers(url)
    with storage_errors(url), temporary_storage(url) as storage, shared.lock("storage"):
        results = 0
        running: dict[tuple[str, Liveness], list[FrozenTrial]] = {}
        for _, trial in _trials(storage, name):
            if trial.state.is_finished() and RESULT_ATTR in trial.user_attrs:
                results += 1
            owner = trial.user_attrs.get(OWNER)
            if trial.state is TrialState.RUNNING and owner is not None:
                liveness = shared.liveness(owner)
                if liveness is not Liveness.DEAD:
                    running.setdefault((owner, liveness), []).append(trial)
        if running:
            return ReportDeferred(_waiting_for(running), True)
        header = optuna.load_study(study_name=name, storage=storage)
        reported = header.user_attrs[REPORTED]
        if reported == results and reported != reported_before:
            reason = "another process, which ended at the same time, writes the analysis"
            return ReportDeferred(reason, False)
        header.set_user_attr(REPORTED, results)
    return None


def take_over(url: str, name: str) -> list[str]:
    """Release the trials of processes whose state is UNKNOWN; return a line for each process.

    Trials of processes that are known to be alive are not released.

    Raises:
        StorageError: if the storage cannot be used.
    """
    shared = peers(url)
    released: dict[str, list[FrozenTrial]] = {}
    with storage_errors(url), temporary_storage(url) as storage, shared.lock("storage"):
        for study_name, trial in _trials(storage, name):
            owner = trial.user_attrs.get(OWNER)
            if trial.state is not TrialState.RUNNING or owner is None:
                continue
            if shared.liveness(owner) is Liveness.UNKNOWN:
                study = optuna.load_study(study_name=study_name, storage=storage)
                end_interrupted(study, trial.number, trial.user_attrs)
                released.setdefault(owner, []).append(trial)
    lines = []
    for owner, trials in released.items():
        process = f"{describe_owner(owner)}, which does not answer"
        lines.append(
            f"released {counted(len(trials), 'trial')} of {process} (started {_since(trials)})"
        )
    return lines


def _trials(storage: BaseStorage, name: str) -> Iterator[tuple[str, FrozenTrial]]:
    """Yield all trials and repeats of a study, each with the name of its Optuna study."""
    for study in storage.get_all_studies():
        if study.study_name.startswith(f"{name} | "):
            for trial in storage.get_all_trials(study._study_id, deepcopy=False):
                yield study.study_name, trial


def _waiting_for(running: dict[tuple[str, Liveness], list[FrozenTrial]]) -> str:
    parts = []
    is_unknown = False
    for (owner, liveness), trials in running.items():
        verb = "is" if len(trials) == 1 else "are"
        count = counted(len(trials), "trial")
        part = f"{count} {verb} still run by {describe_owner(owner)} since {_since(trials)}"
        if liveness is Liveness.UNKNOWN:
            part += ", which does not answer"
            is_unknown = True
        parts.append(part)
    advice = "the last process to finish writes the analysis"
    if is_unknown:
        advice += f"; if a process that does not answer has ended, {TAKE_OVER} releases its trials"
    return f"{'; '.join(parts)}; {advice}"


def _since(trials: list[FrozenTrial]) -> str:
    """Return the earliest start time of some trials, by the clock of their process."""
    starts = [trial.datetime_start for trial in trials if trial.datetime_start is not None]
    if not starts:
        return "an unknown time"
    first = min(starts)
    if first.date() == datetime.date.today():
        return f"{first:%H:%M}"
    return f"{first:%Y-%m-%d %H:%M}"
