"""A study with several workers ends with an error if a worker left a trial that no other takes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from lit_dps.parallel.process import Interrupted, StopRequest
from lit_dps.storage.schema import OWNER
from lit_dps.study import workers
from lit_dps.study.workers import WorkerDied, _WorkerPool, work_in_processes
from tests.support.runs import trials_of
from tests.unit.storage.test_store import CELLS, DEAD, ended, store, url  # noqa: F401

DIED = WorkerDied(17, -9)
LEFT = Interrupted("SIGTERM")


@pytest.fixture
def end_with(monkeypatch, url):  # noqa: F811
    """Return a function that runs a study of one trial, and the last messages of its workers."""

    def run(messages: list[Exception | None]) -> list:
        left = iter(messages)
        monkeypatch.setattr(workers, "wait", lambda running, timeout: running[:1])
        monkeypatch.setattr(workers, "_receive", lambda *args: next(left))
        monkeypatch.setattr(workers, "_open_queue", lambda setup: store(url, 1, CELLS[:1]))
        monkeypatch.setattr(
            _WorkerPool,
            "start_worker",
            lambda pool, number: pool.running.update({number: SimpleNamespace(pid=17)}),
        )
        return list(work_in_processes(SimpleNamespace(), len(messages), StopRequest()))

    return run


# The messages of two workers come in any order, whichever worker ended first.
@pytest.mark.parametrize("messages", [[None, DIED], [DIED, None], [None, LEFT], [LEFT, None]])
def test_a_trial_that_a_worker_left_is_noticed(url, end_with, messages):  # noqa: F811
    queue = store(url, 1, CELLS[:1])
    (trial,) = trials_of(queue)
    (claimed,) = queue._claims.values()
    queue.storage.set_trial_user_attr(claimed._trial_id, OWNER, DEAD)
    (error,) = [message for message in messages if message]
    with pytest.raises(type(error)) as raised:
        end_with(messages)
    assert raised.value is error
    assert [again.point for again in trials_of(store(url, 1, CELLS[:1]))] == [trial.point]


@pytest.mark.parametrize("messages", [[None, DIED], [DIED, None], [LEFT, None]])
def test_a_study_whose_trials_have_all_ended_continues(url, end_with, messages):  # noqa: F811
    queue = store(url, 1, CELLS[:1])
    for trial in trials_of(queue):
        queue.store_result(ended(trial))
    assert end_with(messages) == []


def test_a_trial_that_another_command_trains_is_left_to_it(url, end_with):  # noqa: F811
    queue = store(url, 1, CELLS[:1])
    (trial,) = trials_of(queue)
    assert end_with([None, DIED]) == []
    assert queue.store_result(ended(trial)).attempt == 0
