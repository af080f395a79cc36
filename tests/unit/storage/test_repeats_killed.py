"""Repeats of processes that were killed, and that failed."""

from __future__ import annotations

import pytest

from lit_dps.core.repeats import RepeatPlan
from lit_dps.core.trial import Status
from lit_dps.storage.header import declare
from lit_dps.storage.read import read_study
from lit_dps.storage.schema import OWNER, RESULT_ATTR, encode_result
from tests.support.runs import trials_of
from tests.unit.core.test_repeats import GOAL, A, B, config, ended, search, store, which
from tests.unit.storage.test_store import DEAD


@pytest.fixture
def url(tmp_path):
    return f"sqlite:///{tmp_path}/study.db"


def test_a_repeat_of_a_dead_process_and_a_failed_one_run_again(url):
    search(s := store(url, RepeatPlan()))
    s = store(url)
    lost, failed, kept = (s.claim_next().trial for _ in range(3))
    s._claims[lost.cell, lost.point, 1].set_user_attr(OWNER, DEAD)
    s.store_result(ended(failed, None, Status.FAILED, ran=16))
    assert which(trials_of(s)) == [(B, 0, 2), (A, 1, 1)], (
        "not the failed one: it runs again in the next run"
    )
    s.release_claims()
    again = store(url, run_number=1)
    assert (
        which(trials_of(again)) == [(A, 1, 1), (A, 1, 2), (B, 0, 1), (B, 0, 2)] and kept.cell == B
    )


def test_the_repeat_of_a_process_that_was_killed_once_its_result_was_written_counts(url):
    """Killed between writing the result and ending the trial: it would be run by nobody, and be
    read by nobody."""
    search(store(url, RepeatPlan()))
    declare(url, config(repeats=2), "w", GOAL, {}, {})
    killed = store(url)
    trial = killed.claim_next().trial
    claimed = killed._claims[trial.cell, trial.point, 1]
    claimed.set_user_attr(OWNER, DEAD)
    claimed.set_user_attr(RESULT_ATTR, encode_result(ended(trial, 96)))
    assert which(search(store(url))) == [(A, 1, 2), (B, 0, 1), (B, 0, 2)]
    assert [r.trial.repeat for r in read_study(url, "s").repeats[A]] == [1, 2]
