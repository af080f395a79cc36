"""A study whose K* is the median of the best three: raced, killed, resumed, analyzed."""

from __future__ import annotations

import os
import shutil
import signal

import optuna
import pandas as pd
import pytest

from lit_dps.analysis.summary import summarize
from lit_dps.storage.read import read_study
from tests.e2e.commands import FAST, ROOT, results, run_here, start, table, wait_for_results
from tests.support.texts import in_one_line

pytestmark = pytest.mark.slow
QUICKSTART = ROOT / "configs/quickstart.yaml"
MEDIAN = "median_of_best_3"
GRID = ("--study.batch_sizes", "[32, 128]", "--study.sparsities", "[0]", "--study.trials", 5)
STUDY = ("study", "--config", QUICKSTART, *GRID)
STATISTIC = ("--study.statistic", MEDIAN)


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    """The folder of the study with K* the minimum, in which each trial runs to its end."""
    folder = tmp_path_factory.mktemp("full")
    done = run_here(folder, *STUDY, "--study.race_factor", "null")
    assert done.returncode == 0, done.stderr
    return folder


def record_of(folder):
    return read_study(f"sqlite:///{folder}/mlruns/study.db", "quickstart")


@pytest.mark.long
def test_a_raced_study_that_was_killed_has_the_median_of_the_full_one(tmp_path, full):
    database = tmp_path / "mlruns" / "study.db"
    process = start(tmp_path, *STUDY, *STATISTIC, "--study.workers", 2)
    wait_for_results(database, 3, process)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(60)
    before = results(database)

    changed = run_here(tmp_path, *STUDY)
    assert changed.returncode == 2 and "study.statistic" in changed.stderr
    assert results(database) == before

    done = run_here(tmp_path, *STUDY, *STATISTIC)
    assert done.returncode == 0, done.stderr
    assert "K* is the median of the steps of the best 3 trials" in in_one_line(done.stdout)

    record = record_of(tmp_path)
    trials = record_of(full).results
    for summary in summarize(record):
        of_full = sorted(r.steps for r in trials[summary.cell] if r.steps is not None)
        assert summary.k_star == of_full[1] == summary.best.steps
        assert summary.counts["outraced"] + summary.counts["complete"] == 5
    storage = f"sqlite:///{database}"
    header = optuna.load_study(study_name="quickstart", storage=storage)
    assert header.metric_names == ["K*: median of best 3"]
    assert sorted(trial.value for trial in header.trials) == sorted(
        summary.k_star for summary in summarize(record)
    )


def test_analyze_shows_the_median_of_stored_trials(tmp_path, unbroken):
    folder = tmp_path / "copy"
    shutil.copytree(unbroken, folder)
    before = table(folder)
    done = run_here(folder, "analyze", "--config", FAST, "--statistic", MEDIAN)
    assert done.returncode == 0, done.stderr
    assert "K* is the median of the steps of the best 3 trials" in in_one_line(done.stdout)
    assert table(folder) == before, "the files of the study stay"
    cells = pd.read_csv(folder / f"mlruns/figures/fast/{MEDIAN}/table.csv")
    trials = read_study(f"sqlite:///{folder}/mlruns/study.db", "fast").results
    k_star = cells.set_index(["batch_size", "sparsity"])["k_star"]
    assert len(k_star) == len(trials) == 4
    for cell, of_cell in trials.items():
        of_full = sorted(r.steps for r in of_cell if r.steps is not None)
        assert k_star[cell.batch_size, cell.sparsity] == of_full[1], cell
    refused = run_here(folder, "analyze", "--config", FAST, "--statistic", "median")
    assert refused.returncode == 2 and len(refused.stderr.splitlines()) == 1
