"""Data parallelism end to end: the same table from torchrun, from a plain command, from any number
of ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.e2e.commands import (
    FAST,
    FAST_TRIALS,
    ROOT,
    real,
    results,
    run,
    run_forked,
    run_here,
    start,
    start_forked,
    table,
    wait_for_results,
)
from tests.support.errors import error_line, refusals_in
from tests.support.processes import forked_by, runs, started_by_torchrun

pytestmark = pytest.mark.slow
STUDY = ("study", "--config", FAST)
TWO = ("--trainer.devices", 2, "--trainer.strategy", "ddp")


def torchrun(n: int, *args: object) -> list[str]:
    """What follows `python` on the command line of torchrun on one machine."""
    options = (
        "--nproc-per-node",
        n,
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        "localhost:0",
        "--max-restarts",
        0,
    )
    return [
        "-m",
        "torch.distributed.run",
        *map(str, options),
        str(ROOT / "cli.py"),
        *map(str, args),
    ]


def by_torchrun(folder: Path, n: int, *args: object) -> subprocess.CompletedProcess:
    return run_forked(folder, torchrun(n, *args))


@pytest.mark.long
def test_torchrun_ends_with_the_table_of_one_process_and_reruns_nothing(tmp_path):
    few = ("--study.batch_sizes", "[64]", "--study.trials", 2)
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    assert run_here(one, *STUDY, *few).returncode == 0
    done = by_torchrun(two, 2, *STUDY, *few)
    assert done.returncode == 0, done.stderr
    once = dict.fromkeys(results(one / "mlruns" / "study.db"), 1)
    assert len(once) == 4 and results(two / "mlruns" / "study.db") == once
    assert table(two) == table(one)
    assert done.stdout.count("trials in MLflow") == 1, "one rank alone reports"
    again = by_torchrun(two, 2, *STUDY, *few)
    assert again.returncode == 0, again.stderr
    assert "no trials remain" in again.stderr


@pytest.mark.long  # by interpreters of their own; the others are forked
def test_torchrun_trains_in_interpreters_of_their_own(tmp_path):
    few = ("--study.batch_sizes", "[64]", "--study.trials", 2)
    done = real(tmp_path, torchrun(2, *STUDY, *few))
    assert done.returncode == 0, done.stderr
    assert len(results(tmp_path / "mlruns" / "study.db")) == 4


@pytest.mark.long
def test_a_plain_command_goes_on_at_another_number_of_ranks(tmp_path, unbroken):
    part = ("--study.trials", 2)
    more = (*TWO, "--study.trials", 3)
    for command, options in (
        (run_here, part),
        (run, more),
        (run, (*TWO, "--study.workers", 2)),
    ):  # of two ranks each
        done = command(tmp_path, *STUDY, *options)
        assert done.returncode == 0, done.stderr
    assert results(tmp_path / "mlruns" / "study.db") == dict.fromkeys(FAST_TRIALS, 1)
    assert table(tmp_path) == table(unbroken)


SMALL = (
    "--study.batch_sizes",
    "[2]",
    "--study.trials",
    2,
    "--goal.error",
    0.6,
    "--goal.max_steps",
    200,
    "--goal.early_reject",
    "true",
)


@pytest.mark.long
def test_four_ranks_train_on_two_examples(tmp_path):
    for name, options in {
        "one": (),
        "four": ("--trainer.devices", 4, "--trainer.strategy", "ddp"),
    }.items():
        (tmp_path / name).mkdir()
        done = (run if options else run_here)(tmp_path / name, *STUDY, *SMALL, *options)
        assert done.returncode == 0, done.stderr
    assert table(tmp_path / "four") == table(tmp_path / "one")


@pytest.mark.long
@pytest.mark.parametrize(
    ("launcher", "who"),
    [pytest.param("torchrun", "first", marks=pytest.mark.long), ("plain", "last")],
)
def test_a_killed_rank_ends_the_job_and_its_trial_is_run_again(tmp_path, unbroken, launcher, who):
    database = tmp_path / "mlruns" / "study.db"
    process = (
        start(tmp_path, *STUDY, *TWO)
        if launcher == "plain"
        else start_forked(tmp_path, torchrun(2, *STUDY))
    )
    wait_for_results(database, 2, process)
    ranks = (
        [process.pid, *forked_by(process.pid)]
        if launcher == "plain"
        else started_by_torchrun(process.pid)
    )
    assert len(ranks) == 2
    begin = time.monotonic()
    os.kill(ranks[0 if who == "first" else 1], signal.SIGKILL)
    code = process.wait(60)
    assert code not in (0, None)
    while any(map(runs, ranks)) and time.monotonic() < begin + 60:
        time.sleep(0.1)
    assert not any(map(runs, ranks)), "a rank trains on"
    said = (tmp_path / "output.txt").read_text()
    if launcher == "torchrun":
        assert "Signal 9 (SIGKILL) received by PID" in said
    elif who == "last":  # the first cannot say anything any more
        assert "lit-dps: error: rank 0: another of 2 ranks died or cannot be reached" in said
    before = results(database)
    assert len(before) < len(FAST_TRIALS)

    done = run_here(tmp_path, *STUDY)
    assert done.returncode == 0, done.stderr
    assert before <= results(database) == dict.fromkeys(FAST_TRIALS, 1)
    assert table(tmp_path) == table(unbroken)


@pytest.mark.long
def test_a_stopped_command_gives_its_trial_back(tmp_path, unbroken):
    database = tmp_path / "mlruns" / "study.db"
    process = start(tmp_path, *STUDY, *TWO)
    wait_for_results(database, 2, process)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal sends Ctrl-C: to all processes
    assert process.wait(60) == 130, (tmp_path / "output.txt").read_text()
    assert "trials remain; the same command resumes" in (tmp_path / "output.txt").read_text()
    done = run_here(tmp_path, *STUDY)
    assert done.returncode == 0, done.stderr
    assert table(tmp_path) == table(unbroken)


FIT = ("fit", "--config", FAST, "--pruning.sparsity", 0.5, "--model.learning_rate", 0.05)


@pytest.mark.long  # a study of several ranks, and one by torchrun, are short forms
def test_fit_ends_alike_by_one_process_two_and_torchrun(tmp_path):
    runs = [run_here(tmp_path, *FIT), run(tmp_path, *FIT, *TWO), by_torchrun(tmp_path, 2, *FIT)]
    for done in runs:
        assert done.returncode == 0, done.stderr
    said = [
        line
        for done in runs
        for line in done.stdout.splitlines()
        if line.startswith("complete after")
    ]
    assert len(said) == 3 and len(set(said)) == 1, said


def test_what_torchrun_contradicts_is_refused_in_one_line(tmp_path):
    done = by_torchrun(tmp_path, 2, *STUDY, "--trainer.devices", 3)
    assert done.returncode != 0
    assert refusals_in(done.stderr) == [("trainer.devices", "3")]
    assert "forcefully" not in done.stderr, (
        "the other rank, which waits for the first, ends when it is told"
    )
    assert not (tmp_path / "mlruns").exists()


STILLBORN = """
import os
from lit_dps.parallel import launch

class Deadly:
    def __reduce__(self):
        return os._exit, (3,)

launch.WATCH_SECONDS = 1
if __name__ == "__main__":
    with launch.group_of(2, False, print, Deadly()):
        pass
"""


def test_a_rank_that_dies_before_it_joins_ends_the_job(tmp_path):
    (tmp_path / "stillborn.py").write_text(STILLBORN)
    done = run_forked(tmp_path, ["stillborn.py"])
    assert done.returncode == 2
    assert error_line(done.stderr) and done.stderr.count("\n") == 1
