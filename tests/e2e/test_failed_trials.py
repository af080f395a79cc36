"""Trials whose module raises: the study goes on without them, and the same command runs them
again."""

from __future__ import annotations

from pathlib import Path

import mlflow
import pytest
import yaml

from lit_dps.core.trial import Cell, Status, TrialResult
from lit_dps.storage.read import read_study

CELL = Cell(16, 0.0)
STUDY = ("study", "--config", "failing.yaml")
FAILURES = Path("mlruns/failures/failing")


@pytest.fixture
def configured(tmp_path, monkeypatch):
    """Writes failing.yaml: a study of so many trials whose module fails above a learning rate."""

    def write(above: float, trials: int) -> None:
        config = {
            "model": {
                "class_path": "tests.e2e.failing_user.Failing",
                "init_args": {"above": above},
            },
            "data": {"class_path": "tests.e2e.plain_user.TwoMoons"},
            "trainer": {"accelerator": "cpu"},
            "goal": {"error": 0.1, "check_interval": 4, "max_steps": 40},
            "study": {
                "name": "failing",
                "batch_size_key": "data.batch",
                "batch_sizes": [CELL.batch_size],
                "sparsities": [CELL.sparsity],
                "trials": trials,
                "workers": 1,
                "race_factor": None,
                "space": {"model.lr": {"low": 1e-3, "high": 0.1, "scale": "log"}},
            },
        }
        Path("failing.yaml").write_text(yaml.safe_dump(config))

    monkeypatch.chdir(tmp_path)
    return write


def stored() -> dict[int, TrialResult]:
    return {
        r.trial.point: r for r in read_study("sqlite:///mlruns/study.db", "failing").results[CELL]
    }


def runs() -> dict[int, mlflow.entities.Run]:
    client = mlflow.MlflowClient(f"sqlite:///{Path.cwd()}/mlruns/mlflow.db")
    found = client.search_runs([e.experiment_id for e in client.search_experiments()])
    return {
        int(r.data.tags["lit_dps.point"]): r
        for r in found
        if r.data.tags["lit_dps.kind"] == "trial"
    }


@pytest.mark.slow
def test_a_study_goes_on_without_failed_trials_and_runs_them_again_when_the_module_is_mended(
    call, configured
):
    configured(above=0.02, trials=6)
    done = call(*STUDY)
    assert done.code == 1, done.err
    first = stored()
    failed = {point for point, result in first.items() if result.status is Status.FAILED}
    assert set(first) == set(range(6)) and 1 <= len(failed) <= 5
    assert failed == {
        point for point, result in first.items() if result.trial.params["model.lr"] > 0.02
    }
    said = done.err.splitlines()[-1]
    assert (
        said.startswith(f"lit-dps: {len(failed)} trial")
        and str(FAILURES) in said
        and "the same command" in said
    )
    assert "cells 1/1  trials 6/6" in done.err
    assert "study failing, " in done.out, "the table is printed as always"

    files = {path.name: path.read_text() for path in FAILURES.iterdir()}
    assert set(files) == {f"{CELL} point-{point}.txt" for point in failed}
    logged = runs()
    client = mlflow.MlflowClient(f"sqlite:///{Path.cwd()}/mlruns/mlflow.db")
    for point in failed:
        assert first[point].failure == "ValueError: a label of step 7 is out of range"
        text = files[f"{CELL} point-{point}.txt"]
        assert text.startswith("Traceback") and "in training_step" in text
        assert (logged[point].info.status, logged[point].data.tags["lit_dps.status"]) == (
            "FAILED",
            "failed",
        )
        copy = client.download_artifacts(logged[point].info.run_id, "traceback.txt")
        assert Path(copy).read_text() == text

    Path("mended").touch()
    done = call(*STUDY)
    assert done.code == 0, done.err
    again = stored()
    assert Status.FAILED not in {result.status for result in again.values()}
    assert all(again[point] == first[point] for point in set(range(6)) - failed), (
        "the others did not run again"
    )
    assert not FAILURES.parent.exists()
    assert {point: run.info.status for point, run in runs().items()} == dict.fromkeys(
        range(6), "FINISHED"
    )

    done = call(*STUDY)
    assert done.code == 0 and "no trials remain" in done.err


@pytest.mark.long  # tests/zoo/test_stopping.py has one of a module
@pytest.mark.slow
def test_a_study_whose_first_trials_all_fail_ends_at_once(call, configured):
    configured(above=0.0, trials=6)
    for ended in (3, 6):  # the points that wait come before those that failed
        done = call(*STUDY)
        assert done.code == 1
        expected = (
            "lit-dps: error: the first 3 trials failed, the last with ValueError: a label "
            "of step "
            "7 is out of range"
        )
        last = done.err.splitlines()[-1]
        assert last.startswith(
            f"{expected}. Tracebacks are in {FAILURES}. It would fail again: all trials of this study"
        )
        assert (
            "ValueError in failing_user.py, line " in last
            and "Change the code or the configuration" in last
        )
        assert "Traceback (most recent" not in done.err
        assert {r.status for r in stored().values()} == {Status.FAILED}
        assert len(stored()) == len(list(FAILURES.iterdir())) == ended
    Path("mended").touch()
    assert call(*STUDY).code == 0
    assert len(stored()) == 6 and not FAILURES.exists()
