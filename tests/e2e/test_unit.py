"""A study whose K* is in examples or in seconds: raced, killed, resumed, analyzed."""

from __future__ import annotations

import math
import os
import signal

import pandas as pd
import pytest

from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.summary import summarize
from lit_dps.core.trial import Status
from lit_dps.storage.read import read_study
from tests.e2e.commands import FAST, run_here, start_until_claim

STUDY = ("study", "--config", FAST, "--study.sparsities", "[0]", "--study.race_factor", "1")
EXAMPLES = ("--goal.unit", "examples")


def record_of(folder):
    return read_study(f"sqlite:///{folder}/mlruns/study.db", "fast")


def least_cost(results, column):
    """Return the least value of a column at the first check that meets the goal."""
    costs = []
    for result in results:
        for value, cost in zip(result.curve["val_error"], result.curve[column], strict=True):
            if value <= 0.2 + 1e-7:
                costs.append(cost)
                break
    return min(costs)


@pytest.fixture(scope="module")
def examples(tmp_path_factory):
    folder = tmp_path_factory.mktemp("examples")
    done = run_here(folder, *STUDY, *EXAMPLES)
    assert done.returncode == 0, done.stderr
    assert "K* [examples]" in done.stdout
    return folder


def test_k_star_is_the_fewest_examples_of_the_curves(examples):
    record = record_of(examples)
    table = pd.read_csv(examples / "mlruns/figures/fast/table.csv")
    assert table["unit"].tolist() == ["examples"] * 2
    for summary, k_star in zip(summarize(record), table["k_star"], strict=True):
        results = record.results[summary.cell]
        assert summary.k_star == k_star == least_cost(results, "examples")
        assert summary.k_star == summary.best.steps * summary.cell.batch_size
        for result in results:
            if result.status is Status.OUTRACED:
                assert result.curve["examples"][-1] <= k_star


@pytest.mark.long
def test_k_star_and_repeats_are_seconds_of_the_curves(tmp_path):
    options = ("--study.batch_sizes", "[64]", "--study.repeats", 3, "--study.repeat_slack", 100)
    options += ("--goal.max_steps", 400)
    done = run_here(tmp_path, *STUDY, "--goal.unit", "seconds", *options)
    assert done.returncode == 0, done.stderr
    assert "K* [s]" in done.stdout and "goal.unit = seconds" in done.stdout
    record = record_of(tmp_path)
    (summary,) = summarize(record)
    assert summary.k_star == least_cost(record.results[summary.cell], "seconds")
    assert 0 < summary.k_star == summary.best.curve["seconds"][-1] < summary.best.seconds
    figures = tmp_path / "mlruns/figures/fast"
    repeats = record.repeats[summary.cell]
    assert [result.trial.point for result in repeats] == [summary.best.trial.point] * 3
    (row,) = pd.read_csv(figures / "repeats.csv").to_dict("records")
    costs = sorted(math.inf if r.cost is None else r.curve["seconds"][-1] for r in repeats)
    assert (row["steps"], row["repeats"]) == (pytest.approx(summary.k_star), 3)
    assert [row["least"], row["median"], row["most"]] == pytest.approx(costs)
    (answer,) = Analysis(record).answer.to_dict("records")
    assert answer["seconds"] == pytest.approx(row["median"])
    steps = sorted(math.inf if r.steps is None else r.steps for r in repeats)
    assert (answer["steps"], answer["examples"]) == (steps[1], steps[1] * 64)


@pytest.mark.slow
@pytest.mark.long
def test_a_study_in_examples_that_was_killed_equals_the_unbroken_one(tmp_path, examples):
    process = start_until_claim(tmp_path, 4, *STUDY, *EXAMPLES)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(60)
    refused = run_here(tmp_path, *STUDY)
    assert refused.returncode == 2 and "goal.unit" in refused.stderr
    done = run_here(tmp_path, *STUDY, *EXAMPLES)
    assert done.returncode == 0, done.stderr
    killed, unbroken = record_of(tmp_path), record_of(examples)
    for cell, results in unbroken.results.items():
        costs = [(r.trial.point, r.status, r.curve) for r in results]
        assert [(r.trial.point, r.status, r.curve) for r in killed.results[cell]] == costs


def test_advice_is_in_steps(tmp_path):
    refused = run_here(tmp_path, "advise", "--config", FAST, *EXAMPLES, "--budget", "1m")
    assert refused.returncode == 2 and "goal.unit" in refused.stderr
    assert not (tmp_path / "mlruns").exists()
