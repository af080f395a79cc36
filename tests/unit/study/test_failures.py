"""Failed trials: not run again in the same run of a study, but in the next; kept, shown and told
of."""

from __future__ import annotations

import math
import time
import traceback
from pathlib import Path

import pytest

from lit_dps.core.attempt import AttemptRules
from lit_dps.core.goal import Goal
from lit_dps.core.racing import longest_attempt
from lit_dps.core.trial import Cell, Status, Trial, TrialResult
from lit_dps.storage import cells
from lit_dps.storage.cells import stored_reruns_above
from lit_dps.storage.merge import merge
from lit_dps.storage.read import open_elsewhere, read_study
from lit_dps.storage.run_records import begin_run
from lit_dps.storage.samplers import SobolSampler
from lit_dps.storage.schema import RESULT_ATTR, encode_result
from lit_dps.storage.trial_queue import TrialQueue
from lit_dps.study.failures import AllFail, Failure, Failures, failure_in
from lit_dps.study.progress import Progress, ProgressLog, RunPlan
from tests.support.runs import trials_of
from tests.support.texts import numbers_in
from tests.unit.storage.test_store import SPACE, cell_trials, ended
from tests.unit.storage.test_store_shared import declared

GOAL = Goal(0.1)
CELL = Cell(4, 0.0)


def failed(trial: Trial, checked: int = 16, seconds: float = 1.0) -> TrialResult:
    curve = {"step": [checked], "val_error": [0.1], "train_loss": [1.0]} if checked else {}
    return TrialResult(
        trial,
        Status.FAILED,
        None,
        curve,
        seconds=seconds,
        failure="ValueError: no",
        traceback="Traceback\nno",
    )


@pytest.fixture
def url(tmp_path):
    url = f"sqlite:///{tmp_path}/study.db"
    declared(url)
    return url


def opened(url: str, run_number: int = 0, **kw) -> TrialQueue:
    return TrialQueue(
        url,
        "s",
        [CELL],
        3,
        SobolSampler(SPACE, 5),
        5,
        AttemptRules(GOAL),
        run_number=run_number,
        **kw,
    )


def next_run(url: str, **kw) -> TrialQueue:
    """The store of a worker of another run of the study."""
    return opened(url, begin_run(url, "s"), **kw)


def run(store: TrialQueue, fails=(), status=Status.FAILED) -> list[int]:
    """Runs what a store asks for; the points that it asked for, in order."""
    points = []
    for trial in trials_of(store):
        points.append(trial.point)
        assert len(points) < 20, "a failed trial is run again and again"
        store.store_result(
            (failed(trial) if status is Status.FAILED else ended(trial, status))
            if trial.point in fails
            else ended(trial)
        )
    return points


def test_a_failed_trial_is_run_again_by_the_next_run_of_the_study_alone(url):
    number = begin_run(url, "s")
    assert run(opened(url, number), fails=[1]) == [0, 1, 2]
    assert [r.status for r in read_study(url, "s").results[CELL]] == [
        "complete",
        "failed",
        "complete",
    ]
    assert run(opened(url, number)) == [], "another worker of the same run"
    assert run(next_run(url), fails=[1]) == [1]
    assert run(next_run(url)) == [1]
    assert [r.status for r in read_study(url, "s").results[CELL]] == ["complete"] * 3
    assert run(next_run(url)) == []
    assert len(cell_trials(url, CELL)) == 5


def test_a_failed_trial_that_runs_again_is_not_finished(url):
    run(next_run(url), fails=[1])
    assert len(read_study(url, "s").results[CELL]) == 3
    store = next_run(url)
    (trial,) = trials_of(store)
    record = read_study(url, "s")
    assert [each.trial.point for each in record.results[CELL]] == [0, 2]
    assert record.running[CELL] == 1
    store.store_result(ended(trial))
    assert len(read_study(url, "s").results[CELL]) == 3


@pytest.mark.parametrize("shift", [-86400, 86400])
def test_the_clock_does_not_decide_whether_a_failed_trial_is_run_again(url, shift, monkeypatch):
    number = begin_run(url, "s")
    assert run(opened(url, number), fails=[1]) == [0, 1, 2]
    now = time.time() + shift
    monkeypatch.setattr(time, "time", lambda: now)
    assert run(opened(url, number)) == [], "another worker of the same run"
    assert run(next_run(url), fails=[1]) == [1]
    assert run(next_run(url)) == [1]


def test_a_run_does_not_repeat_what_failed_in_another_one_that_goes_on_beside_it(url):
    first = next_run(url)
    asked = trials_of(first)
    trial = next(asked)
    second = next_run(url)
    first.store_result(failed(trial))
    assert sorted(run(second)) == [1, 2], "it began before the trial failed"
    assert run(next_run(url)) == [0]


def test_a_merged_failure_is_run_again_whatever_number_its_run_had(url, tmp_path):
    other = f"sqlite:///{tmp_path}/other.db"
    declared(other)
    for _ in range(9):
        begin_run(other, "s")
    run(next_run(other), fails=[1])
    with open_elsewhere(other, url) as elsewhere:
        merge(url, [elsewhere])
    assert run(next_run(url)) == [1]


@pytest.mark.parametrize("status", [Status.STOPPED, Status.INFEASIBLE, Status.INCOMPLETE])
def test_other_ends_are_final(url, status):
    assert run(opened(url), [1], status) == [0, 1, 2]
    assert run(next_run(url)) == []


def test_a_failed_trial_whose_process_was_killed_at_its_end_counts_from_when_it_failed(
    url, monkeypatch
):
    first = opened(url)
    trial = next(trials_of(first))
    monkeypatch.setattr(cells, "_set_final_state", lambda *args: None)  # killed before
    first.store_result(failed(trial))
    monkeypatch.undo()
    monkeypatch.setattr(first.peers, "alive", lambda who: False)
    assert run(next_run(url)) == [1, 2, 0]


def test_a_trial_that_failed_beyond_where_it_had_to_go_is_not_run_again(url):
    store = opened(url, race_factor=2.0)
    for trial in trials_of(store):
        store.store_result(ended(trial) if trial.point else failed(trial, checked=48))
    assert run(next_run(url, race_factor=2.0)) == [], "K* is 16, so it is as good as outraced"
    assert [r.status for r in read_study(url, "s").results[CELL]] == [
        "outraced",
        "complete",
        "complete",
    ]


def test_how_far_an_attempt_tells():
    trial = Trial(CELL, 0)
    for result, number, expected in [
        (None, 0, -math.inf),
        (ended(trial, Status.OUTRACED), 0, 16),
        (ended(trial, Status.STOPPED), 0, math.inf),
        (failed(trial), 2, 16),
        (failed(trial, checked=0), 2, -math.inf),
        (failed(trial), 3, math.inf),
        (failed(trial), 0, 16),
    ]:
        attrs = {}
        if result is not None:
            attrs[RESULT_ATTR] = encode_result(result, failed_in=number)
        assert stored_reruns_above(attrs, run_number=3) == expected


def test_files_of_tracebacks_come_and_go(tmp_path):
    failures = Failures(tmp_path / "failures" / "s")
    assert failures.summary() == ""
    failures.add(ended(Trial(CELL, 7)))
    failures.add(failed(Trial(CELL, 0)))
    file = tmp_path / "failures" / "s" / "B=4 S=0 point-0.txt"
    assert file.read_text() == "Traceback\nno"
    assert failures.summary().startswith("1 trial ") and str(file.parent) in failures.summary()
    failures.add(failed(Trial(CELL, 1)))
    assert failures.summary().startswith("2 trials ") and str(file.parent) in failures.summary()
    for point in (0, 1):
        Failures(file.parent).add(ended(Trial(CELL, point)))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_ends_no_study(tmp_path):
    (tmp_path / "failures").touch()
    failures = Failures(tmp_path / "failures" / "s")
    failures.add(failed(Trial(CELL, 0)))
    failures.add(ended(Trial(CELL, 1)))
    assert failures.summary().startswith("1 trial ")


def fails_with(trial: Trial, error: str = "ValueError: no", line: int = 7) -> TrialResult:
    text = (
        f'Traceback (most recent call last):\n  File "/home/me/case.py", line {line}, in '
        f"training_step\n    x\n{error}"
    )
    return TrialResult(trial, Status.FAILED, None, failure=error, traceback=text)


def after(folder: Path, *results: TrialResult, earlier: tuple[TrialResult, ...] = ()) -> Failures:
    failures = Failures(folder, earlier)
    for result in results:
        failures.add(result)
    return failures


SAME = Failure("ValueError", "case.py, line 7, in training_step")
DENSE, SPARSE, LARGE = Cell(4, 0.0), Cell(4, 0.8), Cell(8, 0.8)


@pytest.mark.parametrize(
    ("results", "expected"),
    [
        ([fails_with(Trial(SPARSE, 0)), fails_with(Trial(SPARSE, 1))], {"this study": SAME}),
        (
            [ended(Trial(DENSE, 0)), fails_with(Trial(SPARSE, 0)), fails_with(Trial(LARGE, 0))],
            {"S=0.8": SAME},
        ),
        (
            [
                ended(Trial(DENSE, 0)),
                ended(Trial(LARGE, 0)),
                *[fails_with(Trial(SPARSE, i)) for i in (0, 1)],
            ],
            {"B=4 S=0.8": SAME},
        ),
        ([ended(Trial(DENSE, 0)), fails_with(Trial(SPARSE, 0))], {}),
        ([ended(Trial(SPARSE, 0)), fails_with(Trial(SPARSE, 1)), fails_with(Trial(SPARSE, 2))], {}),
        ([fails_with(Trial(SPARSE, 0)), fails_with(Trial(SPARSE, 1), line=8)], {}),
        ([fails_with(Trial(SPARSE, 0)), fails_with(Trial(SPARSE, 1), "KeyError: 3")], {}),
        ([fails_with(Trial(SPARSE, i), "torch.OutOfMemoryError: CUDA") for i in (0, 1)], {}),
        ([fails_with(Trial(SPARSE, i), "FileNotFoundError: [Errno 2] x") for i in (0, 1)], {}),
        ([failed(Trial(SPARSE, 0)), failed(Trial(SPARSE, 1))], {}),
    ],
)
def test_kinds_of_trials_that_always_fail_in_the_same_place(tmp_path, results, expected):
    failures = after(tmp_path, *results)
    assert failures.lasting() == expected
    # Those that always fail are listed, with what to do.
    assert all(kind in failures.summary() for kind in expected)
    assert (str(SAME) in failures.summary()) == bool(expected)


def test_a_trial_that_failed_in_the_same_place_in_an_earlier_run_of_the_study(tmp_path):
    earlier = (ended(Trial(SPARSE, 0)), fails_with(Trial(SPARSE, 1)))
    trial = Trial(SPARSE, 1)
    failures = after(tmp_path, fails_with(trial), earlier=earlier)
    assert failures.lasting() == {f"{SPARSE} {trial.file_name}": SAME}
    assert after(tmp_path, fails_with(Trial(SPARSE, 1), line=9), earlier=earlier).lasting() == {}
    assert after(tmp_path, earlier=earlier).summary() == "", "nothing failed in this run"


def test_the_last_frame_of_a_chained_traceback_is_the_place():
    try:
        try:
            int("a")
        except ValueError:
            raise KeyError("of two\nlines: here") from None
    except KeyError:
        text = traceback.format_exc()
    assert failure_in(text).error == "KeyError"
    assert failure_in(text).place.endswith(
        "in test_the_last_frame_of_a_chained_traceback_is_the_place"
    )
    assert failure_in("no traceback") is None


@pytest.mark.parametrize(
    ("fails", "at_once"), [([0, 1, 2], True), ([0, 1, 3, 4], False), ([1, 2, 3], False)]
)
def test_a_study_ends_when_its_first_trials_all_failed(tmp_path, fails, at_once):
    failures, told = Failures(tmp_path), []
    try:
        for point in range(6):
            told.append(point)
            trial = Trial(CELL, point)
            failures.add(failed(trial) if point in fails else ended(trial))
    except AllFail as error:
        assert at_once and told == [0, 1, 2]
        assert error.value == "ValueError: no"
        assert str(tmp_path) in str(error) and numbers_in(str(error))[0] == 3
    else:
        assert not at_once


def test_progress_counts_the_failed_trials_of_this_run_as_finished():
    earlier = [failed(Trial(CELL, 0)), ended(Trial(CELL, 1))]
    progress = ProgressLog(
        Progress(RunPlan(dict.fromkeys([CELL], 400), 3, race_factor=2), {CELL: earlier})
    )
    assert progress.progress.finished() == {CELL: 1}
    for result in (
        failed(Trial(CELL, 0)),
        ended(Trial(CELL, 2), Status.OUTRACED),
        failed(Trial(CELL, 2)),
    ):
        progress.update(result)
    assert progress.progress.finished() == {CELL: 3}


def test_a_failed_attempt_replaces_a_paused_one_and_is_replaced_by_any():
    trial = Trial(CELL, 0)
    paused, fails = ended(trial, Status.OUTRACED), failed(trial)
    assert longest_attempt(paused, fails) is fails, "though it came no further"
    assert longest_attempt(fails, paused) is paused
    assert longest_attempt(ended(trial), fails).status is Status.COMPLETE
