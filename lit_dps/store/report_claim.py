"""Of several processes that work on a study, the last one out writes the analysis, once."""

from __future__ import annotations

import optuna
from optuna.trial import TrialState

from lit_dps.store.database import peers, storage_errors, storage_for_now
from lit_dps.store.schema import RESULT_ATTR
from lit_dps.store.trials import OWNER

REPORTED = "reported"  # how many results the last analysis was made from


def claim_report(url: str, name: str) -> str | None:
    """Why the analysis is left to another process; None if it is this one's, which has then taken it upon itself.

    Args:
        url: Optuna storage URL.
        name: The study's name.

    Raises:
        StorageError: if the storage cannot be used.
    """
    shared = peers(url)
    with storage_errors(url), storage_for_now(url) as storage, shared.lock("storage"):
        results = running = 0
        for study in storage.get_all_studies():
            if not study.study_name.startswith(f"{name} | "):
                continue
            for trial in storage.get_all_trials(study._study_id, deepcopy=False):
                results += trial.state.is_finished() and RESULT_ATTR in trial.user_attrs
                running += trial.state is TrialState.RUNNING and shared.alive(trial.user_attrs.get(OWNER))
        if running:
            shown = "1 trial is" if running == 1 else f"{running} trials are"
            return f"{shown} still run by other processes; the last one out writes the analysis"
        header = optuna.load_study(study_name=name, storage=storage)
        if header.user_attrs.get(REPORTED) == results:
            return "another process, which ended at the same time, writes the analysis"
        header.set_user_attr(REPORTED, results)
    return None
