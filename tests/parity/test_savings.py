"""On real images: with all savings on, a study finds the K* and the best trial that it finds with
all off."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lit_dps.analysis.summary import summarize
from lit_dps.core.racing import truncate_at_race_limit
from lit_dps.core.record import StudyRecord
from lit_dps.core.statistic import MINIMUM
from lit_dps.storage.read import read_study
from tests.e2e.commands import ROOT, run, run_here
from tests.parity.authors import DATA

ROOT_OF_DATA = Path(os.environ.get("LIT_DPS_DATA", DATA))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not ROOT_OF_DATA.is_dir(),
        reason="the real data sets are not on this machine (LIT_DPS_DATA)",
    ),
]
OFF = (
    "--study.race_factor",
    "null",
    "--goal.early_reject",
    "false",
    "--engine",
    "lightning",
)
ON = ("--study.race_factor", "1")  # all others are on by default
GOALS = {"mnist": 0.1, "fashion-mnist": 0.25}
# A pass of saliency takes a quarter of a minute a point, most of the test; it has a saving of its
# own, scores that are reused, which one of the cases is enough for
METHOD, TRIALS = {("mnist", 0): "snip"}, {"snip": 3, "magnitude": 4}


def study(folder, data: str, seed: int, workers: int, options) -> StudyRecord:
    folder.mkdir()
    method = METHOD.get((data, seed), "magnitude")
    arguments = (
        *("study", "--config", ROOT / f"configs/{data}-simple-cnn-momentum.yaml"),
        *("--goal.error", GOALS[data], "--goal.check_interval", 16, "--goal.max_steps", 96),
        *("--study.batch_sizes", "[32]", "--study.sparsities", "[0, 0.9]", "--study.goals", "[]"),
        *("--pruning.method", method, "--study.trials", TRIALS[method]),
        *(
            "--study.space",
            "{model.learning_rate: {low: 0.005, high: 0.2, scale: log}}",
            "--study.name",
            "savings",
        ),
        *("--study.seed", seed, "--study.workers", workers, "--data.root", ROOT_OF_DATA),
    )
    done = (run_here if workers == 1 else run)(folder, *arguments, *options)
    assert done.returncode == 0, done.stderr
    return read_study(f"sqlite:///{folder}/mlruns/study.db", "savings")


@pytest.mark.parametrize(
    ("data", "seed"),
    [
        pytest.param("fashion-mnist", 0, marks=pytest.mark.long),
        pytest.param("mnist", 0, marks=pytest.mark.long),
        pytest.param("mnist", 1, marks=pytest.mark.long),
        pytest.param("fashion-mnist", 1, marks=pytest.mark.long),
    ],
)
def test_all_savings_on_find_what_all_savings_off_find(tmp_path, data, seed):
    off = study(tmp_path / "off", data, seed, 1, OFF)
    best = [(cell.k_star, cell.best.trial.point if cell.best else None) for cell in summarize(off)]
    assert best[0][0] is not None, "the dense cell tells nothing"
    for workers in (1, 2) if seed == 0 else (2,):
        on = study(tmp_path / f"on-{workers}", data, seed, workers, ON)
        assert [
            (cell.k_star, cell.best.trial.point if cell.best else None) for cell in summarize(on)
        ] == best
        for cell in off.cells:
            told = [
                (r.status, r.steps, r.curve["train_loss"])
                for r in truncate_at_race_limit(off.results[cell], 1, MINIMUM)
            ]
            assert [
                (r.status, r.steps, r.curve["train_loss"])
                for r in truncate_at_race_limit(on.results[cell], 1, MINIMUM)
            ] == told
