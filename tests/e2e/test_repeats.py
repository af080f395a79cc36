"""A study with repeats ends alike however it is run: in one go or added later, killed, by one worker or several."""

from __future__ import annotations

import os
import signal
import time

import pytest

from lit_dps.store import read_study
from tests.e2e.commands import FAST, results, run_here, start, table

pytestmark = pytest.mark.slow
SMALL = ("study", "--config", FAST, "--study.batch_sizes", "[16]", "--study.trials", 3)
REPEATS = ("--study.repeats", 3, "--study.repeat_slack", 3)


def repeated(folder) -> list[tuple]:
    record = read_study(f"sqlite:///{folder}/mlruns/study.db", "fast")
    every = [r for repeats in record.repeats.values() for r in repeats]
    return [(str(r.trial), r.status, r.steps, r.curve["train_loss"]) for r in every]


def test_killed_or_added_later_repeats_are_those_of_one_go(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir(), killed.mkdir()
    assert run_here(whole, *SMALL, *REPEATS).returncode == 0
    expected = repeated(whole)
    assert len(expected) == 6 and len({tuple(losses) for *_, losses in expected}) == 6
    assert "repeats: the point of K* on 3 fresh seeds" in table(whole)

    assert run_here(killed, *SMALL).returncode == 0
    database = killed / "mlruns" / "study.db"
    stored = sum(results(database).values())
    process = start(killed, *SMALL, *REPEATS, "--study.workers", 2)
    wait_for_results_beyond(database, stored, process)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(60)
    assert sum(results(database).values()) < stored + 6
    again = run_here(killed, *SMALL, *REPEATS)
    assert again.returncode == 0, again.stderr
    assert repeated(killed) == expected
    assert table(killed) == table(whole)
    assert "nothing left to run" in run_here(killed, *SMALL, *REPEATS).stderr
    synced = run_here(killed, "analyze", "--config", FAST, "--sync")
    assert synced.returncode == 0 and "repeats: the point of K*" in synced.stdout


def wait_for_results_beyond(database, stored, process):
    """Waits until one more result is stored; the counts of `wait_for_results` are of points."""
    end = time.monotonic() + 200
    while sum(results(database).values()) <= stored:
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.02)
