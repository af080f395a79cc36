"""The line below a report with the command that retrains the best trial. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping

from lit_dps.analysis.analysis import Analysis
from lit_dps.core.config import StorageConfig
from lit_dps.core.identity import OBJECTS
from lit_dps.report.answer import retrain_command
from lit_dps.storage.urls import without_password

# Class paths that only the script or notebook can import that ran the study.
LOCAL_MODULES = ("__main__.", f"{OBJECTS}.")


def retrain_hint(analysis: Analysis, storage: StorageConfig) -> str:
    """Return a line with the command that retrains the best trial of the fastest cell.

    Empty without any K*, and if the command cannot import the model or the data.
    """
    for section in ("model", "data"):
        part = analysis.record.config.get(section)
        if isinstance(part, Mapping) and str(part.get("class_path")).startswith(LOCAL_MODULES):
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
