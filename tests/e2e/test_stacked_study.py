"""A study in lockstep ends with the table of one that trains its trials one at a time."""

from __future__ import annotations

import os
import signal

import pytest

from tests.e2e.commands import (
    FAST,
    FAST_TRIALS,
    results,
    run,
    run_here,
    start_until_claim,
    table,
)
from tests.support.errors import refusals_in

pytestmark = pytest.mark.slow
STUDY = ("study", "--config", FAST)
STACKED = (*STUDY, "--engine", "stacked")


@pytest.mark.long  # that of a raced study is a short form
@pytest.mark.parametrize("options", [(), ("--study.workers", 2, "--study.slots", 3)], ids=str)
def test_the_table_is_the_same(tmp_path, unbroken, options):
    done = (run if options else run_here)(tmp_path, *STACKED, *options)
    assert done.returncode == 0, done.stderr
    assert "because" not in done.stderr
    assert results(tmp_path / "mlruns" / "study.db") == dict.fromkeys(FAST_TRIALS, 1)
    assert table(tmp_path) == table(unbroken)


@pytest.mark.long
def test_a_raced_study_in_lockstep_tells_what_a_raced_study_tells(tmp_path):
    raced = ("--study.race_factor", 1, "--goal.early_reject", "true")
    for name, arguments in (("one", STUDY), ("stacked", STACKED)):
        (tmp_path / name).mkdir()
        assert run_here(tmp_path / name, *arguments, *raced).returncode == 0
    assert table(tmp_path / "stacked") == table(tmp_path / "one")


@pytest.mark.long
def test_a_killed_study_in_lockstep_goes_on(tmp_path, unbroken):
    database = tmp_path / "mlruns" / "study.db"
    # A stack of 3 claims its 6th trial when 3 networks have ended.
    process = start_until_claim(tmp_path, 6, *STACKED, "--study.slots", 3)
    os.kill(process.pid, signal.SIGKILL)
    process.wait(60)
    before = results(database)
    assert 2 <= len(before) <= 3
    done = run(tmp_path, *STACKED, "--study.workers", 2)
    assert done.returncode == 0, done.stderr
    after = results(database)
    assert before <= after and after == dict.fromkeys(FAST_TRIALS, 1)
    assert table(tmp_path) == table(unbroken)


@pytest.mark.parametrize(
    "options, key, value",
    [
        (("--study.lean", "false"), "study.lean", "false"),
        (("--trainer.devices", 2), "study.engine", "'stacked'"),
    ],
    ids=str,
)
def test_what_lockstep_cannot_do_is_refused(tmp_path, options, key, value):
    done = run_here(tmp_path, *STACKED, *options)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert f"{key} is {value}; " in done.stderr
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("option", ["--engine", "--study.engine"])
def test_the_removed_engine_is_refused_in_one_line(tmp_path, option):
    done = run_here(tmp_path, *STUDY, option, "sparse")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert refusals_in(done.stderr) == [("study.engine", "'sparse'")]
    assert not [*tmp_path.iterdir()]


def test_what_cannot_be_stacked_is_told_once_and_run(tmp_path):
    small = ("--study.batch_sizes", "[16,64]", "--study.sparsities", "[0]", "--study.trials", 2)
    done = run_here(tmp_path, *STACKED, *small, "--trainer.detect_anomaly", "true")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("trainer.detect_anomaly") == 1
