"""A study whose process is ended in the middle of a long trial goes on from there, not from the
trial's first step."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import time
from pathlib import Path

import pytest

from lit_dps.core.exit_codes import ExitCode
from lit_dps.storage.read import read_study
from lit_dps.training.checkpoint_files import CheckpointFile, steps_saved
from tests.e2e.commands import FAST, run, run_here, start, table

pytestmark = pytest.mark.slow
LONG = (
    *("study", "--config", FAST, "--study.batch_sizes", "[16]", "--study.sparsities", "[0.5]"),
    *(
        "--goal.error",
        0.001,
        "--goal.check_interval",
        20,
        "--goal.early_reject",
        "true",
    ),  # nobody gets there
)
STEPS = 1600
BUDGET = ("--goal.max_steps", STEPS)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of the long study, undisturbed and without checkpoints."""
    folder = tmp_path_factory.mktemp("whole")
    done = run_here(
        folder, *LONG, *BUDGET, "--study.trials", 2, "--study.checkpoint_minutes", "null"
    )
    assert done.returncode == ExitCode.NO_RESULT, done.stderr
    assert not (folder / "mlruns" / "checkpoints").exists()
    return folder


def found(folder: Path) -> list:
    """All results, with their curves, but for the time they took."""
    record = read_study(f"sqlite:///{folder}/mlruns/study.db", "fast")
    return [
        dataclasses.replace(r, seconds=0.0) for cell in record.cells for r in record.results[cell]
    ]


def wait_for_checkpoint(folder: Path, process, name: str = "fast") -> None:
    end = time.monotonic() + 200
    while not list(folder.glob(f"mlruns/checkpoints/{name}/*/point-*.ckpt")):
        assert process.poll() is None, "the study ended before it could be interrupted"
        assert time.monotonic() < end, "nothing is saved"
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("sent", "workers"),
    [
        (signal.SIGKILL, 1),
        *(pytest.param(signal.SIGTERM, n, marks=pytest.mark.long) for n in (1, 2)),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_a_long_trial_goes_on_where_it_was(tmp_path, whole, sent, workers):
    options = ("--study.trials", 2, "--study.workers", workers, "--study.checkpoint_minutes", 0.002)
    process = start(tmp_path, *LONG, *BUDGET, *options)
    wait_for_checkpoint(tmp_path, process)
    os.kill(process.pid, sent)
    assert process.wait(100) == (-signal.SIGKILL if sent == signal.SIGKILL else 130)
    assert len(found(tmp_path)) < 2

    done = run(tmp_path, *LONG, *BUDGET, *options)
    assert done.returncode == ExitCode.NO_RESULT, done.stderr
    steps = re.findall(r"B=16 S=0\.5 sample \d resumes from step (\d+)", done.stderr)
    assert steps and all(0 < int(step) < STEPS for step in steps), done.stderr
    assert table(tmp_path) == table(whole)
    assert found(tmp_path) == found(whole)
    assert not (tmp_path / "mlruns" / "checkpoints").exists(), "nothing is left"


@pytest.mark.long
def test_a_trial_that_paused_in_a_heat_goes_on_with_the_next(tmp_path, monkeypatch):
    find, went_on = CheckpointFile.find, []

    def noting(self, *args):
        path = find(self, *args)
        went_on.append(path and (path.stem, steps_saved(path)))
        return path

    monkeypatch.setattr(CheckpointFile, "find", noting)
    folders = tmp_path / "saved", tmp_path / "anew"
    for folder, minutes in zip(folders, (1e-6, "null"), strict=True):
        folder.mkdir()
        options = (
            "--study.trials",
            2,
            "--study.race_factor",
            2,
            "--study.checkpoint_minutes",
            minutes,
        )
        done = run_here(folder, *LONG, "--goal.max_steps", 1280, *options)
        assert done.returncode == ExitCode.NO_RESULT, done.stderr
        assert "goes on" not in done.stderr, "a pause is no news"
    assert went_on == [None, None, ("point-0", 320), ("point-1", 320)], (
        "without files nobody looks for one"
    )
    assert found(folders[0]) == found(folders[1])
    assert table(folders[0]) == table(folders[1])


@pytest.mark.long  # without a study, unit/test_checkpoint_ranks.py
def test_a_trial_of_two_ranks_goes_on_too(tmp_path):
    ddp = (
        "--trainer.devices",
        2,
        "--trainer.strategy",
        "ddp",
        "--study.trials",
        1,
        "--goal.max_steps",
        600,
    )
    folders = tmp_path / "broken", tmp_path / "whole"
    for folder in folders:
        folder.mkdir()
    saved = (*LONG, *ddp, "--study.checkpoint_minutes", 0.002)
    process = start(folders[0], *saved)
    wait_for_checkpoint(folders[0], process)
    os.kill(process.pid, signal.SIGKILL)
    process.wait(60)
    done = run(folders[0], *saved)
    assert done.returncode == ExitCode.NO_RESULT, done.stderr
    assert len(re.findall(r"B=16 S=0\.5 sample 0 resumes from step \d+", done.stderr)) == 1, (
        done.stderr
    )
    done = run(folders[1], *LONG, *ddp)
    assert done.returncode == ExitCode.NO_RESULT, done.stderr
    assert found(folders[0]) == found(folders[1])
    assert not (folders[0] / "mlruns" / "checkpoints").exists(), "nothing is left"
