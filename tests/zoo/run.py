"""Runs a study of animals in this process and returns what came out, beside what the auditor
saw."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import yaml

from lit_dps.analysis.analysis import Analysis
from lit_dps.core.record import StudyRecord
from lit_dps.core.trial import TrialResult
from lit_dps.storage.read import read_study
from tests.e2e.commands import run_here
from tests.zoo.auditor import Audit, Check, audited

ANIMALS = "tests.zoo.animals."
RATES = {"model.lr": {"low": 5e-3, "high": 5e-2, "scale": "log"}}
TRAINER = {"accelerator": "cpu"}
GOAL = {"error": 0.11, "check_interval": 5, "max_steps": 40}
STUDY = {
    "name": "zoo",
    "batch_sizes": [8, 32],
    "sparsities": [0.0, 0.8],
    "trials": 1,
    "workers": 1,
    "race_factor": None,
}
STUDY["noise_scale"] = False  # test_plain.py has it


@dataclass
class Outcome:
    """What a study came to.

    Attributes:
        code, out, err: Of the command.
        folder: Where it ran.
        goal: The goal's configuration.
        study: What is stored; None without a database.
        audits: What the auditor saw of each run.
    """

    code: int
    out: str
    err: str
    folder: Path
    goal: dict[str, Any]
    study: StudyRecord | None
    audits: list[Audit]

    @property
    def results(self) -> list[TrialResult]:
        """The stored results, in the order of cells and points."""
        return [result for cell in self.study.cells for result in self.study.results[cell]]

    def audit(self, result: TrialResult) -> Audit:
        """The audit of the run that a result is of: that with its checks, at its batch size and
        sparsity."""
        told, cell = (
            list(zip(result.curve["step"], result.curve["val_error"], strict=True)),
            result.trial.cell,
        )
        same = [
            a for a in self.audits if [(c.step, c.error) for c in self.checks(a, result)] == told
        ]
        assert same, f"no run had the checks {told} stored for {cell}"

        def fits(audit: Audit) -> bool:
            return bool(audit.mask) == (cell.sparsity > 0) and cell.batch_size in audit.steps

        return next((audit for audit in same if fits(audit)), same[0])

    def checks(self, audit: Audit, result: TrialResult) -> list[Check]:
        """The checks of a run; Lightning validates once more, off the grid, where a module stops
        its trainer."""
        stopped = result.status == "stopped"
        return [c for c in audit.checks if not (stopped and c.step % self.goal["check_interval"])]


def spec(name: str | Mapping[str, Any], **arguments: Any) -> dict[str, Any]:
    """The configuration of an animal, by its name below `tests.zoo.animals`, or of any class by its
    full path."""
    if isinstance(name, Mapping):
        return dict(name)
    return {
        "class_path": name if "." in name.partition(".")[2] else ANIMALS + name,
        "init_args": arguments,
    }


def study(
    folder: Path,
    model: str | Mapping[str, Any] = "models.Net",
    data: str | Mapping[str, Any] = "data.Clouds",
    trainer: Mapping[str, Any] | None = None,
    goal: Mapping[str, Any] | None = None,
    pruning: Mapping[str, Any] | None = None,
    space: Mapping[str, Any] | None = None,
    copies: Mapping[str, str] | None = None,
    options: Sequence[str] = (),
    **arguments: Any,
) -> Outcome:
    """Runs a study to its end, without figures and MLflow.

    Args:
        folder: The folder to run in.
        model, data: See `spec`.
        trainer, goal, pruning: What the sections have beside, or instead of, what they have here.
        space: The whole of study.space.
        copies: See `Audit`.
        options: Further options of the command.
        **arguments: The same of the section study.
    """
    config = {
        "model": spec(model),
        "data": spec(data),
        "trainer": {**TRAINER, **(trainer or {})},
        "goal": {**GOAL, **(goal or {})},
        "pruning": {"batch_size": 50, **(pruning or {})},
        "study": {**STUDY, "space": RATES if space is None else space, **arguments},
    }
    (folder / "zoo.yaml").write_text(yaml.safe_dump(config))
    monitor = config["goal"].get("monitor", "val_error")
    with (
        pytest.MonkeyPatch.context() as patch,
        warnings.catch_warnings(),
        audited(monitor, copies or {}) as audits,
    ):
        patch.setattr("lit_dps.report.publish.write_all", lambda *args, **kwargs: ([], []))
        patch.setattr("lit_dps.report.publish._write_page", _write_empty)
        patch.setattr("lit_dps.study.run.mlflow_of", lambda *args: MagicMock(experiment_id="0"))
        _show_warnings()
        done = run_here(folder, "study", "--config", "zoo.yaml", "--show", "notes", *options)
    database = folder / "mlruns" / "study.db"
    record = read_study(f"sqlite:///{database}", "zoo") if database.exists() else None
    return Outcome(
        done.returncode, done.stdout, done.stderr, folder, config["goal"], record, audits
    )


def _write_empty(study: Analysis, path: Path, pictures: Sequence[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return path


def _show_warnings() -> None:
    """Warnings go where a user sees them, and not into pytest's report."""

    def show(message, category, filename, lineno, file=None, line=None) -> None:
        sys.stderr.write(warnings.formatwarning(message, category, filename, lineno, line))

    warnings.resetwarnings()
    for kind in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", kind)
    warnings.showwarning = show
