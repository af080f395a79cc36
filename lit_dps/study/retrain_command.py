"""How to train the trial of K* again, as the table of a study ends."""

from __future__ import annotations

from lit_dps.analysis.analysis import Analysis
from lit_dps.core.config import StorageConfig
from lit_dps.report.commands import again_command, fastest
from lit_dps.storage.urls import without_password


def again_text(analysis: Analysis, storage: StorageConfig) -> str:
    """A line with the command for the fastest cell; empty without any K*."""
    given, default = vars(storage), vars(StorageConfig())
    changed = [key for key in ("folder", "optuna") if given[key] != default[key]]
    where = [part for key in changed for part in (f"--storage.{key}", without_password(given[key]))]
    command = again_command(analysis, where)
    return (
        ""
        if command is None
        else f"train the trial of K* at {fastest(analysis)} again: {command}\n"
    )
