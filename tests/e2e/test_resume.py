"""A study that is stopped at any moment goes on with the same command, and ends with an unbroken
one's table."""

from __future__ import annotations

import os
import signal

import pytest
import yaml

from tests.e2e.commands import (
    FAST,
    FAST_TRIALS,
    results,
    run_here,
    start,
    start_until_claim,
    table,
    wait_for_results,
)
from tests.support.processes import forked_by

pytestmark = pytest.mark.slow
STUDY = ("study", "--config", FAST)


@pytest.mark.parametrize(
    ("sent", "group"),
    [
        # as a terminal sends Ctrl-C: to all processes
        pytest.param(signal.SIGINT, True, marks=pytest.mark.long),
        (signal.SIGKILL, False),  # the parent alone: its workers must not train on
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_an_interrupted_study_of_two_workers_equals_the_unbroken_one(
    tmp_path, unbroken, sent, group
):
    database = tmp_path / "mlruns" / "study.db"
    process = start(tmp_path, *STUDY, "--study.workers", 2)
    wait_for_results(database, 2, process)
    (os.killpg if group else os.kill)(process.pid, sent)
    code = process.wait(60)
    assert code == (-signal.SIGKILL if sent == signal.SIGKILL else 130)
    assert_resumes(tmp_path, unbroken)


@pytest.mark.long
def test_a_study_that_is_interrupted_twice_equals_the_unbroken_one(tmp_path, unbroken):
    # An interrupted process has claimed its second trial, and then its fifth.
    for claim, stored in ((2, 1), (5, 5)):
        process = start_until_claim(tmp_path, claim, *STUDY)
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGCONT)
        assert process.wait(60) == 130
        assert len(results(tmp_path / "mlruns" / "study.db")) == stored
    assert_resumes(tmp_path, unbroken)


def assert_resumes(tmp_path, unbroken):
    """Resume an interrupted study; it ends like the unbroken one."""
    database = tmp_path / "mlruns" / "study.db"
    before = results(database)
    assert 0 < len(before) < len(FAST_TRIALS)
    # On a busy machine other warnings may have the places of the last screen.
    partial = run_here(tmp_path, "analyze", "--config", FAST, "--show", "notes")
    assert partial.returncode == 0, partial.stderr
    assert "trials have not finished" in partial.stdout

    done = run_here(tmp_path, *STUDY)
    assert done.returncode == 0, done.stderr
    after = results(database)
    assert before <= after, "a stored result was lost"
    assert after == dict.fromkeys(FAST_TRIALS, 1), "a point was lost or run twice"
    assert table(tmp_path) == table(unbroken)


@pytest.mark.long
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM])
def test_one_worker_that_ends_leaves_the_rest_to_the_others(tmp_path, unbroken, sent):
    database = tmp_path / "mlruns" / "study.db"
    process = start(tmp_path, *STUDY, "--study.workers", 2)
    wait_for_results(database, 2, process)
    pid = forked_by(process.pid)[0]
    os.kill(pid, sent)
    assert process.wait(200) == 0
    said = (tmp_path / "output.txt").read_text()
    assert (f"warning: worker {pid} was killed (exit code -9)" in said) is (sent == signal.SIGKILL)
    assert results(database) == dict.fromkeys(FAST_TRIALS, 1), "a point was lost or run twice"
    assert table(tmp_path) == table(unbroken)


@pytest.mark.long
def test_when_all_workers_are_killed_the_study_ends_and_goes_on_later(tmp_path, unbroken):
    database = tmp_path / "mlruns" / "study.db"
    process = start(tmp_path, *STUDY, "--study.workers", 2)
    wait_for_results(database, 2, process)
    for pid in forked_by(process.pid):
        os.kill(pid, signal.SIGKILL)
    assert process.wait(60) == 2
    said = (tmp_path / "output.txt").read_text()
    assert "was killed (exit code -9); the same command resumes the study" in said.splitlines()[-1]
    assert "Traceback" not in said
    assert run_here(tmp_path, *STUDY).returncode == 0
    assert results(database) == dict.fromkeys(FAST_TRIALS, 1), "a point was lost or run twice"
    assert table(tmp_path) == table(unbroken)


def test_finished_study_reruns_nothing_refuses_changes_and_can_be_extended(tmp_path):
    small = ("--study.batch_sizes", "[64]", "--study.trials", "2")
    assert run_here(tmp_path, *STUDY, *small).returncode == 0
    database = tmp_path / "mlruns" / "study.db"
    first = results(database)
    assert len(first) == 4

    again = run_here(tmp_path, *STUDY, *small)
    assert again.returncode == 0
    assert "no trials remain" in again.stderr
    assert results(database) == first

    for change, said in [
        (("--goal.error", "0.3"), "goal.error was 0.2 and is 0.3"),
        (("--study.seed", "1"), "study.seed was 0 and is 1"),
        (
            ("--model.optimizer", "nesterov"),
            "model.init_args.optimizer was 'momentum' and is 'nesterov'",
        ),
        (("--data.order", "per_trial"), "data.init_args.order was 'authors' and is 'per_trial'"),
    ]:
        refused = run_here(tmp_path, *STUDY, *small, *change)
        assert refused.returncode == 2
        assert refused.stderr.count("\n") == 1
        assert said in refused.stderr

    extended = run_here(tmp_path, *STUDY)
    assert extended.returncode == 0, extended.stderr
    assert first <= results(database) == dict.fromkeys(FAST_TRIALS, 1)


def test_searched_and_machine_dependent_settings_may_change(tmp_path, unbroken):
    """What each trial sets itself, and where and how fast it runs, is no part of a study's
    identity."""
    config = yaml.safe_load(FAST.read_text())
    config["model"]["init_args"]["learning_rate"] = 0.7
    config["data"]["init_args"] = {"batch_size": 7, "eval_batch_size": 50}
    changed = tmp_path / "changed.yaml"
    changed.write_text(yaml.safe_dump(config))
    done = run_here(unbroken, "study", "--config", changed)
    assert done.returncode == 0, done.stderr
    assert "no trials remain" in done.stderr
