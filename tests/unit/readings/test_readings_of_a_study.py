"""Readings in a whole study: checked before anything is created, stored, and in every table."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pandas as pd
import pytest
from mlflow import MlflowClient

import lit_dps
from lit_dps.analysis.readings import TABLE_COLUMNS
from lit_dps.core.config import StorageConfig, StudyConfig
from lit_dps.core.trial import Status
from lit_dps.report.publish import write_goals
from lit_dps.report.screen import screen
from lit_dps.study.preflight.check import check_study
from tests.support.errors import refuses
from tests.support.setups import check, setup_of
from tests.unit.engines.test_engine import quiet  # noqa: F401
from tests.unit.readings.test_readings import DATA, EASY, PLACE, TINY, WORKLOAD

SPACE = {"model.learning_rate": {"low": 1e-3, "high": 1.0, "scale": "log"}}
READINGS = [f"{PLACE}.Sharpness", f"{PLACE}.Norm", f"{PLACE}.FinalNorm"]
COLUMNS = ["sharpness", "norm", "largest_norm", "random", "final_norm"]


def setup(folder, readings, **study):
    config = StudyConfig(
        batch_sizes=[16],
        sparsities=[0.5],
        trials=2,
        space=SPACE,
        readings=readings,
        **study,
    )
    return setup_of(config, StorageConfig(str(folder / "runs")), WORKLOAD, EASY)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("readings")


@pytest.fixture(scope="module")
def study(folder):
    config = {
        "model": TINY,
        "data": DATA,
        "trainer": {"accelerator": "cpu"},
        "goal": EASY,
        "storage": {"folder": str(folder)},
        "study": {
            "name": "read",
            "batch_sizes": [16, 64],
            "sparsities": [0.5],
            "trials": 4,
            "workers": 1,
            "noise_scale": False,
            "readings": READINGS,
            "space": SPACE,
        },
    }
    return lit_dps.run(config)


def test_tables_of_trials_and_cells_have_the_columns(study):
    trials = study.trials
    assert [*trials.columns[-5:]] == COLUMNS and len(trials) == 8
    complete = trials[trials["status"] == "complete"]
    others = trials[trials["status"] == "outraced"]
    assert len(complete) and len(others)
    assert complete[COLUMNS].notna().all(axis=None)
    assert others["final_norm"].isna().all() and others["norm"].notna().all()
    cells = study.cells
    for _, cell in cells.iterrows():
        best = trials[trials["k_star"] & (trials["batch_size"] == cell["batch_size"])].iloc[0]
        assert [*cell[COLUMNS]] == [*best[COLUMNS]]


def test_curves_have_a_row_for_each_step_that_was_checked_or_read(study):
    curves = study.curves
    for _, trial in study.trials.iterrows():
        rows = curves[
            (curves["point"] == trial["point"]) & (curves["batch_size"] == trial["batch_size"])
        ].set_index("step")
        last = int(trial["steps_run"])
        steps = {*range(4, last + 1, 4), *range(3, last + 1, 3)}
        assert [*rows.index] == sorted(steps)
        assert [*rows.index[rows["val_error"].notna()]] == [*range(4, last + 1, 4)]
        assert [*rows.index[rows["sharpness"].notna()]] == [*range(4, last + 1, 4)]
        norms = rows["norm"].dropna()
        assert [*norms.index] == [*range(3, last + 1, 3)]
        assert [*rows["largest_norm"].dropna()] == [*norms.cummax()]
        assert norms.iloc[-1] == trial["norm"]


def test_no_column_of_a_table_is_free_for_readings(study):
    own = {"learning_rate", "val_error", *COLUMNS}
    for table in (study.trials, study.cells, study.curves):
        assert set(table.columns) - own <= TABLE_COLUMNS


def test_files_report_and_mlflow_have_the_columns(study, folder):
    write_goals(study.analysis, folder / "files", only=None)
    written = pd.read_csv(folder / "files" / "readings.csv")
    assert np.array_equal(written["norm"], study.curves["norm"], equal_nan=True)
    assert set(COLUMNS) <= set(pd.read_csv(folder / "files" / "table.csv").columns)
    text = screen(study.analysis, ["readings"])
    assert all(f"  {column}" in text for column in COLUMNS)
    wide, narrow = screen(study.analysis, width=140), screen(study.analysis, width=60)
    # The columns of readings are the first that a narrow table omits.
    assert all(f"  {column}" in wide for column in ("sharpness", "norm"))
    assert "  sharpness" not in narrow and "Not shown at this width" in narrow
    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    (experiment,) = client.search_experiments(filter_string="name != 'Default'")
    runs = client.search_runs([experiment.experiment_id], "tags.`lit_dps.kind` = 'trial'")
    assert len(runs) == 8
    norms = study.curves.dropna(subset="norm")
    for run in runs:
        point = int(run.data.params["point"]), int(run.data.params["batch_size"])
        expected = norms[(norms["point"] == point[0]) & (norms["batch_size"] == point[1])]
        history = client.get_metric_history(run.info.run_id, "norm")
        is_complete = run.data.tags["lit_dps.status"] == Status.COMPLETE
        # MLflow shows the whole run of a trial that the race stopped or cut.
        assert len(history) >= len(expected) > 0
        for each, step, norm in zip(history, expected["step"], expected["norm"], strict=False):
            assert (each.step, each.value) == (step, norm)
        assert ("final_norm" in run.data.metrics) == is_complete
        assert math.isfinite(run.data.metrics["sharpness"])


@pytest.mark.parametrize("name", ["Colliding", "Empty", "Text", "Changing"])
def test_the_dry_run_refuses_what_a_study_cannot_take(tmp_path, name):
    value = {"Colliding": "k_star", "Changing": "changing"}.get(name, f"{PLACE}.{name}")
    with refuses("study.readings", value):
        check_study(setup(tmp_path, [f"{PLACE}.{name}"]))
    assert not (tmp_path / "runs").exists()


def test_a_name_of_a_column_is_refused(tmp_path):
    with refuses("study.readings", "learning_rate"):
        check(setup(tmp_path, [f"{PLACE}.Reserved"]))


def test_two_readings_of_one_column_are_refused(tmp_path):
    twice = {"class_path": f"{PLACE}.Named", "init_args": {"name": "twice"}}
    with refuses("study.readings", "twice"):
        check(setup(tmp_path, [f"{PLACE}.Norm", twice]))


def test_readings_belong_to_the_identity_of_a_study(tmp_path):
    plain = setup(tmp_path, [])
    read = setup(tmp_path, [f"{PLACE}.Norm", f"{PLACE}.FinalNorm"])
    other = setup(tmp_path, [f"{PLACE}.FinalNorm", {"class_path": f"{PLACE}.Norm"}])
    assert "readings" not in plain.identity(None)["study"]
    assert read.identity(None) == other.identity(None) != plain.identity(None)
    ours = setup(tmp_path, ["gradient_norm"]).identity(None)
    assert setup(tmp_path, ["lit_dps.readings.gradient.GradientNorm"]).identity(None) == ours
    faster = setup(tmp_path, [{"class_path": f"{PLACE}.Norm", "init_args": {"interval": 5}}])
    assert faster.identity(None) != setup(tmp_path, [f"{PLACE}.Norm"]).identity(None)


def test_ranks_need_a_reading_that_is_the_same_on_each(tmp_path):
    trainer = {"accelerator": "cpu", "devices": 2, "strategy": "ddp"}
    two = setup(tmp_path, [f"{PLACE}.Norm"])
    two = dataclasses.replace(two, workload=dataclasses.replace(WORKLOAD, trainer=trainer))
    with refuses("study.readings", "norm"):
        check(two)


def test_local_sgd_refuses_a_reading_after_steps(tmp_path):
    local = setup_of(
        setup(tmp_path, [f"{PLACE}.Norm"]).study,
        StorageConfig(str(tmp_path)),
        WORKLOAD,
        EASY,
        local={"workers": 2},
    )
    with refuses("study.readings", "norm"):
        check(local)
