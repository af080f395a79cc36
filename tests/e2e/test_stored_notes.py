"""Notes of the dry run that weaken a number are stored: each later report of the study has them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import mlflow
import pytest
import yaml

import lit_dps
from tests.e2e.commands import run

# The callback overrides the searched rate. The iterator prevents that trials resume.
USER = """
import lightning
import plain_user

class Classifier(plain_user.Classifier):
    def __init__(self, lr: float = 1e-2):
        super().__init__(lr=lr)
        self.letters = iter("ab")

class FixedRate(lightning.Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        for group in trainer.optimizers[0].param_groups:
            group["lr"] = 0.03
"""
CONFIG = {
    "model": {"class_path": "overriding_user.Classifier"},
    "data": {"class_path": "plain_user.TwoMoons"},
    "trainer": {
        "accelerator": "cpu",
        "callbacks": [{"class_path": "overriding_user.FixedRate"}],
    },
    "goal": {"error": 0.3, "check_interval": 4, "max_steps": 80},
    "study": {
        "name": "idle",
        "batch_size_key": "data.batch",
        "batch_sizes": [16],
        "sparsities": [0.0],
        "trials": 2,
        "workers": 1,
        "noise_scale": False,
        "space": {"model.lr": {"low": 1e-3, "high": 0.1, "scale": "log"}},
    },
}


def write_study(folder: Path) -> None:
    """Write idle.yaml and its modules into a folder."""
    shutil.copy(Path(__file__).with_name("plain_user.py"), folder)
    (folder / "overriding_user.py").write_text(USER)
    (folder / "idle.yaml").write_text(yaml.safe_dump(CONFIG))


@pytest.mark.slow
def test_a_searched_key_without_effect_is_a_warning_in_each_later_report(tmp_path):
    write_study(tmp_path)
    first = run(tmp_path, "study", "--config", "idle.yaml")
    assert first.returncode == 0, first.stderr
    assert "note: model.lr changes nothing" in first.stderr and "cannot resume" in first.stderr
    again = run(tmp_path, "study", "--config", "idle.yaml")
    assert again.stderr.startswith("study idle: no trials remain\n"), "no dry run"
    analyzed = run(tmp_path, "analyze", "--config", "idle.yaml")
    for command in (first, again, analyzed):
        warnings = [line for line in command.stdout.splitlines() if line.startswith("warning: ")]
        assert "model.lr changes nothing" in warnings[0], "the most harmful warning"
        assert "resume" not in command.stdout

    page = (tmp_path / "mlruns/figures/idle/report.html").read_text()
    answer, _, others = page.partition("</section>")
    assert "model.lr changes nothing" in answer and "model.lr changes nothing" in others
    document = json.loads(run(tmp_path, "analyze", "--config", "idle.yaml", "--json").stdout)
    (note,) = [note for note in document["notes"] if "model.lr" in note]
    assert not any("resume" in each for each in document["notes"])
    assert note in lit_dps.load("idle", tmp_path / "mlruns").notes
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlruns/mlflow.db")
    experiments = [each.experiment_id for each in client.search_experiments()]
    (logged,) = client.search_runs(experiments, "tags.`lit_dps.kind` = 'study'")
    assert note in logged.data.tags["mlflow.note.content"]


@pytest.mark.slow
def test_a_rate_without_effect_is_a_note_of_the_advice(tmp_path):
    write_study(tmp_path)
    for _ in ("first", "resumed"):
        done = run(tmp_path, "advise", "--config", "idle.yaml", "--json")
        document = json.loads(done.stdout)
        assert "model.lr changes nothing" in document["notes"][0]
        assert not any("resume" in note for note in document["notes"])
    text = (tmp_path / "mlruns/figures/idle/advice/advice.txt").read_text()
    assert "note: model.lr changes nothing" in text
