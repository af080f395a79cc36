"""A study of a user's own LightningModule and LightningDataModule by class path, as the README
shows it."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path

import mlflow
import pytest
import yaml

from lit_dps.core.config import cores
from lit_dps.storage.read import read_study
from lit_dps.study.hardware import cpu_model, hardware
from tests.e2e.commands import run

CONFIG = {
    "model": {"class_path": "plain_user.Classifier", "init_args": {"width": 32}},
    "data": {"class_path": "plain_user.TwoMoons"},
    "trainer": {"accelerator": "cpu"},
    "goal": {"error": 0.05, "check_interval": 10, "max_steps": 400},
    "study": {
        "name": "moons",
        "batch_size_key": "data.batch",
        "batch_sizes": [8, 64],
        "sparsities": [0.0, 0.8],
        "trials": 3,
        "workers": 2,
        "space": {
            "model.lr": {"low": 1e-3, "high": 0.1, "scale": "log"},
            "model.width": {"low": 16, "high": 64, "scale": "log", "integer": True},
        },
    },
}

SIZES = {"study": 1, "cell": 4, "trial": 12}


@pytest.mark.long  # tests/zoo/test_plain.py has one
@pytest.mark.slow
def test_a_module_that_knows_nothing_of_the_package_is_studied(tmp_path):
    shutil.copy(Path(__file__).with_name("plain_user.py"), tmp_path)
    assert "lit_dps" not in (tmp_path / "plain_user.py").read_text().replace(
        "know nothing of lit_dps", ""
    )
    (tmp_path / "moons.yaml").write_text(yaml.safe_dump(CONFIG))
    done = run(tmp_path, "study", "--config", "moons.yaml")
    assert done.returncode == 0, done.stderr

    with (tmp_path / "mlruns/figures/moons/table.csv").open() as file:
        rows = {
            (int(row["batch_size"]), float(row["sparsity"])): row for row in csv.DictReader(file)
        }
    assert set(rows) == {(8, 0.0), (64, 0.0), (8, 0.8), (64, 0.8)}
    for row in rows.values():
        assert (
            sum(int(row[status]) for status in ("complete", "incomplete", "infeasible", "outraced"))
            == 3
        )
        assert int(row["k_star"]) % 10 == 0  # Adam at these rates learns two moons in 400 steps
        assert 0.001 <= float(row["lr"]) <= 0.1
        assert 16 <= int(row["width"]) <= 64
    with (tmp_path / "mlruns/figures/moons/metaparameters.csv").open() as file:
        trials = list(csv.DictReader(file))
    points = {(row["point"], row["lr"], row["width"]) for row in trials}
    assert len(points) == 3, "every cell sees the same points"

    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlruns/mlflow.db")
    experiment = client.get_experiment_by_name("TwoMoons-Classifier").experiment_id
    runs = {
        kind: client.search_runs([experiment], f"tags.`lit_dps.kind` = '{kind}'") for kind in SIZES
    }
    assert {kind: len(found) for kind, found in runs.items()} == SIZES
    (study,) = runs["study"]
    for sparsity in (0.0, 0.8):
        history = client.get_metric_history(study.info.run_id, f"K_star/S_{sparsity:g}")
        assert {m.step: m.value for m in history} == {
            b: int(rows[b, sparsity]["k_star"]) for b in (8, 64)
        }
    artifacts = {item.path for item in client.list_artifacts(study.info.run_id)}
    assert artifacts >= {
        "config.yaml",
        "scaling.png",
        "metaparameters.png",
        "table.csv",
        "table.txt",
    }
    assert {"mlflow.source.git.commit", "version.torch", "data_digest"} <= study.data.tags.keys()
    (where,) = read_study(f"sqlite:///{tmp_path}/mlruns/study.db", "moons").hardware
    assert where == hardware() and where.startswith(cpu_model()) and f", {cores()} core" in where
