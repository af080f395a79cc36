"""A study with repeats ends alike however it runs: at once or later, killed, on another machine, on
two ranks."""

from __future__ import annotations

import os
import signal
import time

import pytest

from lit_dps.core.errors import StorageError
from lit_dps.storage.read import read_study
from tests.e2e.commands import FAST, run_here, start, table
from tests.support.processes import forked_by, runs

pytestmark = pytest.mark.slow
SMALL = ("study", "--config", FAST, "--study.batch_sizes", "[16]", "--study.trials", 3)
REPEATS = ("--study.repeats", 3, "--study.repeat_slack", 3)


def url_of(folder) -> str:
    return f"sqlite:///{folder}/mlruns/study.db"


def repeated(url: str) -> list[tuple]:
    try:
        record = read_study(url, "fast")
    except StorageError:  # there is none yet
        return []
    every = [r for repeats in record.repeats.values() for r in repeats]
    return [(str(r.trial), r.status, r.steps, r.curve["train_loss"]) for r in every]


def kill_amid_repeats(process, url: str) -> None:
    """Kills all of a study once it has stored a repeat; some are left."""
    end = time.monotonic() + 200
    while not repeated(url):
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.05)
    workers = forked_by(process.pid)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(60)
    while any(map(runs, workers)):  # who still dies counts as alive, and as running its repeat
        assert time.monotonic() < end
        time.sleep(0.05)
    assert 0 < len(repeated(url)) < 6


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a study with repeats that ran undisturbed, in one process."""
    folder = tmp_path_factory.mktemp("whole")
    assert run_here(folder, *SMALL, *REPEATS).returncode == 0
    found = repeated(url_of(folder))
    assert len(found) == 6 and len({tuple(losses) for *_, losses in found}) == 6
    assert "repeats: the best sample on 3 fresh seeds" in table(folder)
    return folder


@pytest.mark.long
def test_killed_or_added_later_repeats_are_those_of_one_go(tmp_path, whole):
    assert run_here(tmp_path, *SMALL).returncode == 0
    url = url_of(tmp_path)
    assert not repeated(url)
    # one worker, so that some repeats are left when the first one is seen
    kill_amid_repeats(start(tmp_path, *SMALL, *REPEATS, "--study.workers", 1), url)
    again = run_here(tmp_path, *SMALL, *REPEATS)
    assert again.returncode == 0, again.stderr
    assert repeated(url) == repeated(url_of(whole))
    assert table(tmp_path) == table(whole)
    assert "no trials remain" in run_here(tmp_path, *SMALL, *REPEATS).stderr
    synced = run_here(tmp_path, "analyze", "--config", FAST, "--sync", "--show", "repeats")
    assert synced.returncode == 0 and "repeats: the best sample" in synced.stdout


@pytest.mark.long
def test_a_server_hands_the_repeats_of_a_killed_process_to_another_machine(
    tmp_path, postgres, whole
):
    study = (*SMALL, *REPEATS, "--storage.optuna", postgres)
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir(), there.mkdir()
    kill_amid_repeats(start(here, *study), postgres)
    again = run_here(there, *study)
    assert again.returncode == 0, again.stderr
    assert repeated(postgres) == repeated(url_of(whole))
    assert table(there) == table(whole)


@pytest.mark.long
def test_two_ranks_repeat_what_one_process_repeats_and_one_goes_on(tmp_path, whole):
    url = url_of(tmp_path)
    kill_amid_repeats(
        start(tmp_path, *SMALL, *REPEATS, "--trainer.devices", 2, "--trainer.strategy", "ddp"), url
    )
    by_ranks = repeated(url)
    for found, expected in zip(by_ranks, repeated(url_of(whole)), strict=False):
        assert found[:3] == expected[:3]
        assert found[3] == pytest.approx(expected[3], rel=1e-4), (
            "the same network on the same batches"
        )
    again = run_here(tmp_path, *SMALL, *REPEATS)
    assert again.returncode == 0, again.stderr
    assert repeated(url)[: len(by_ranks)] == by_ranks, "what two ranks trained stays"
    assert table(tmp_path) == table(whole)
