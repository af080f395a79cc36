"""A study whose box is being widened is killed: it goes on in the wider box, and ends as one that
was left alone."""

from __future__ import annotations

import os
import shutil
import signal

import pytest
import yaml

from tests.e2e.commands import FAST, results, run_here, start_until_claim, table

pytestmark = pytest.mark.slow
RATE, TRIALS = {"model.learning_rate": {"low": 1e-3, "high": 6e-3, "scale": "log"}}, 8


@pytest.mark.long
def test_a_study_killed_in_its_wider_box_ends_as_one_in_one_go(tmp_path):
    file, whole, killed = tmp_path / "narrow.yaml", tmp_path / "whole", tmp_path / "killed"
    config = yaml.safe_load(FAST.read_text())
    config["study"] |= {"batch_sizes": [16], "sparsities": [0.5], "trials": TRIALS, "space": RATE}
    config["study"]["seed"] = 1  # a point of it is near the end
    config["goal"]["error"] = 0.4
    file.write_text(yaml.safe_dump(config))
    study = ("study", "--config", file)
    whole.mkdir()
    assert run_here(whole, *study).returncode == 0
    assert "lit-dps study --extend-space" in table(whole)
    shutil.copytree(whole, killed)
    before = results(killed / "mlruns" / "study.db")
    assert len(before) == TRIALS

    done = run_here(whole, *study, "--extend-space")
    assert done.returncode == 0, done.stderr
    every = results(whole / "mlruns" / "study.db")
    assert len(every) == TRIALS + 4 and set(every.values()) == {1}

    database = killed / "mlruns" / "study.db"
    process = start_until_claim(killed, 2, *study, "--extend-space")
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(60)
    assert before < results(database) < every
    done = run_here(killed, *study)
    assert done.returncode == 0 and "its search space was expanded" in done.stderr, done.stderr
    assert results(database) == every
    assert table(killed) == table(whole)
