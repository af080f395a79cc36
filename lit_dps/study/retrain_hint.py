"""The line below a report with the command that retrains the best trial. Imports no torch."""

from __future__ import annotations

from lit_dps.analysis.analysis import Analysis
from lit_dps.core.config import StorageConfig
from lit_dps.core.identity import local_classes
from lit_dps.report.answer import retrain_command
from lit_dps.storage.urls import without_password


def retrain_hint(analysis: Analysis, storage: StorageConfig) -> str:
    """Return a line with the command that retrains the best trial of the fastest cell.

    Empty without any K*, and if the command cannot import the model or the data.
    """
    config = analysis.record.config
    if local_classes([config.get("model"), config.get("data")]):
        return ""
    default = StorageConfig()
    options: list[str] = []
    for key in ("folder", "optuna"):
        value = getattr(storage, key)
        if value != getattr(default, key):
            options += [f"--storage.{key}", without_password(value)]
    command = retrain_command(analysis, options)
    if command is None:
        return ""
    return f"train the best trial again: {command}\n"
