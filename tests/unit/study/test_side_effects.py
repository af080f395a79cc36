"""Runs that are no trials, of a module that writes into its trial's folder: nothing is left of
them."""

from __future__ import annotations

from pathlib import Path

from lit_dps.core.config import StorageConfig, StudyConfig
from lit_dps.core.noise_scale import NoiseScale
from lit_dps.core.search_space import Range
from lit_dps.core.trial import Cell, Trial
from lit_dps.forecast.step_times import measure
from lit_dps.module import ImageClassifier
from lit_dps.study.noise import first_guess
from lit_dps.training.workload import Workload
from tests.support.runs import train_one
from tests.support.setups import check, setup_of
from tests.unit.engines.test_engine import DATA, GOAL, MODEL, PARAMS, quiet  # noqa: F401


class Scribe(ImageClassifier):
    """Writes into both folders that its trainer tells it."""

    def on_train_start(self) -> None:
        for folder in (self.trainer.default_root_dir, self.trainer.log_dir):
            Path(folder).mkdir(parents=True, exist_ok=True)
            (Path(folder) / "notes").write_text("began")


WORKLOAD = Workload({**MODEL, "class_path": f"{__name__}.Scribe"}, DATA, {"accelerator": "cpu"})
SETUP = setup_of(
    StudyConfig(
        batch_sizes=[16, 32],
        sparsities=[0.5],
        trials=1,
        space={"model.learning_rate": Range(1e-2, 0.1)},
    ),
    StorageConfig(),
    WORKLOAD,
    GOAL,
    {"method": "snip", "biases": "paper", "batch_size": 100},
    {"interval": None},
)


def test_a_trial_writes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train_one(Trial(Cell(16), 0, PARAMS), WORKLOAD, {**GOAL, "max_steps": 4}, lean=False)
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("notes")] == [
        "trials/B=16 S=0/point-0/notes"
    ]


def test_what_runs_before_a_study_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    check(SETUP)
    assert isinstance(first_guess(SETUP), NoiseScale)
    assert list(tmp_path.iterdir()) == []


def test_a_forecast_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("lit_dps.forecast.step_times.SECONDS", 0.02)
    assert measure(SETUP).step.at(16) > 0
    assert list(tmp_path.iterdir()) == []
