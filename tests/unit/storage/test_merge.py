"""Trials of the same study that were run elsewhere are taken over; nothing that is stored is
lost."""

from __future__ import annotations

import dataclasses
import sqlite3
from contextlib import ExitStack, closing
from itertools import permutations

import optuna
import pytest

from lit_dps.analysis.analysis import Analysis
from lit_dps.cli.merge import lines
from lit_dps.core.attempt import AttemptRules
from lit_dps.core.environment import DATA
from lit_dps.core.goal import Goal
from lit_dps.core.trial import Cell
from lit_dps.core.unit import SECONDS
from lit_dps.report.text import render
from lit_dps.storage import merge as merging
from lit_dps.storage.cells import WrongCell
from lit_dps.storage.columns import last_value
from lit_dps.storage.database import open_storage
from lit_dps.storage.header import StudyChanged, extend
from lit_dps.storage.locks import peers
from lit_dps.storage.read import open_elsewhere, read_study
from lit_dps.storage.samplers import SobolSampler
from lit_dps.storage.schema import MERGED_FROM, RESULT_ATTR, cell_study_name
from lit_dps.storage.stored_format import study_attributes
from lit_dps.storage.trial_queue import TrialQueue
from tests.support.fake_study import SPACE, law_results, result, write_study
from tests.support.runs import trials_of
from tests.support.texts import numbers_in

A, B = Cell(4, 0.0), Cell(16, 0.5)
GOAL = Goal(0.1)
IDENTITY = {"goal": {"error": 0.1}}


@pytest.fixture
def here(tmp_path):
    return f"sqlite:///{tmp_path}/here.db"


@pytest.fixture
def there(tmp_path):
    return f"sqlite:///{tmp_path}/there.db"


def written(url: str, results, name: str = "fake", **kw) -> None:
    write_study(url, results, name, **({"identity": IDENTITY, "race_factor": None} | kw))


def merged(url: str, *others: str, only: str | None = None):
    with ExitStack() as stack:
        return merging.merge(
            url, [stack.enter_context(open_elsewhere(other, url)) for other in others], only
        )


def ran(status: str, to: int, value: float = 0.5, point: int = 0, cell: Cell = A):
    """An attempt that ran up to a step, with a curve of that value."""
    curve = {"step": list(range(16, to + 1, 16)), "val_error": [value] * (to // 16)}
    return result(cell, point, to if status == "complete" else None, status, curve=curve)


def rows(url: str) -> list[str]:
    with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as connection:
        return list(connection.iterdump())


def attempts(url: str, cell: Cell = A) -> list[tuple[str, int]]:
    """Status and last step of what is stored of a cell, in its order; "" without a result."""
    found = []
    for trial in optuna.load_study(study_name=cell_study_name("fake", cell), storage=url).trials:
        stored = trial.user_attrs.get(RESULT_ATTR)
        found.append(
            (stored["status"], last_value(stored["curve"])) if stored else (trial.state.name, 0)
        )
    return found


def told(url: str) -> dict:
    return read_study(url, "fake").results


@pytest.mark.parametrize("target", ["sqlite", pytest.param("postgres", marks=pytest.mark.slow)])
def test_a_study_that_is_not_here_is_copied_whole(request, target, here, there):
    url = request.getfixturevalue("postgres") if target == "postgres" else here
    failed = result(
        A,
        12,
        None,
        "failed",
        curve={"step": [16], "val_error": [0.5]},
        failure="no",
        traceback="Trace",
    )
    finished = {A: [*law_results(A, 12, 4e4, 60), failed], B: law_results(B, 12, 4e4, 60)}
    written(
        there,
        finished,
        goals=[0.2],
        race_factor=3.0,
        trials=14,
        running={A: 1},
        interrupted={B: [1, 2]},
    )
    assert [numbers_in(line) for line in lines("fake", merged(url, there)["fake"])] == [[25, 0, 0]]
    ours, theirs = read_study(url, "fake"), read_study(there, "fake")
    assert not any(ours.running.values())
    for key in ("workload", "goal", "space", "trials", "seed", "goals", "race_factor", "config"):
        assert getattr(ours, key) == getattr(theirs, key)
    for cell in finished:
        name = cell_study_name("fake", cell)
        copies, originals = (
            optuna.load_study(study_name=name, storage=each).trials for each in (url, there)
        )
        originals = [trial for trial in originals if RESULT_ATTR in trial.user_attrs]
        for copied, original in zip(copies, originals, strict=True):
            assert copied.user_attrs == original.user_attrs | {MERGED_FROM: there}
            for key in (
                "state",
                "values",
                "params",
                "distributions",
                "datetime_start",
                "datetime_complete",
            ):
                assert getattr(copied, key) == getattr(original, key), key


def test_parts_of_a_grid_join_to_the_whole_either_way_and_twice_is_once(here, there):
    parts = [
        {A: law_results(A, 16, 4e4, 60)},
        {A: law_results(A, 8, 4e4, 60), B: law_results(B, 16, 4e4, 60)},
    ]
    written(here, parts[0], goals=[0.2], race_factor=2.0)
    written(there, parts[1], goals=[0.3], race_factor=None)
    before = {url: study_attributes(open_storage(url), "fake") for url in (here, there)}
    tables = []
    for target, other in permutations((here, there)):
        done = merged(target, other)["fake"]
        assert (done.added, done.unchanged, done.conflicts) == (
            (16, 8, {}) if target == here else (8, 24, {})
        )
        record = read_study(target, "fake")
        tables.append(render(Analysis(record)))
        assert (record.batch_sizes, record.sparsities, record.trials) == ((4, 16), (0.0, 0.5), 16)
        assert (record.goals, record.race_factor) == ((0.3, 0.2), None)
        once = rows(target)
        assert numbers_in(lines("fake", merged(target, other)["fake"])[0])[0] == 0
        assert rows(target) == once
    assert tables[0] == tables[1]
    assert study_attributes(open_storage(here), "fake").keys() == before[here].keys() | {"uid"}


def test_the_targets_uid_and_a_first_origin_stay(here, there, tmp_path):
    third = f"sqlite:///{tmp_path}/third.db"
    written(here, {A: [ran("complete", 32)]}, uid="ours")
    written(there, {A: [ran("complete", 32, point=1)]}, uid="theirs")
    merged(third, there)
    assert study_attributes(open_storage(third), "fake")["uid"] not in (None, "ours", "theirs")
    merged(here, third)
    assert study_attributes(open_storage(here), "fake")["uid"] == "ours"
    trials = optuna.load_study(study_name=cell_study_name("fake", A), storage=here).trials
    assert [trial.user_attrs.get(MERGED_FROM) for trial in trials] == [None, there]


OUTRACED, FURTHER, COMPLETE, FAILED = (
    ran("outraced", 32),
    ran("outraced", 64),
    ran("complete", 96),
    ran("failed", 48),
)
OTHERWISE = ran("complete", 80, 0.4)
ATTEMPTS = [  # ours, theirs, ours after, theirs after; the first two are short forms
    (
        [FAILED, OUTRACED],
        [OUTRACED, FAILED, FURTHER],
        [FAILED, OUTRACED, FURTHER],
        [OUTRACED, FAILED, FURTHER],
    ),
    (
        [OUTRACED],
        [OUTRACED, FURTHER, COMPLETE],
        [OUTRACED, FURTHER, COMPLETE],
        [OUTRACED, FURTHER, COMPLETE],
    ),
    ([OUTRACED], [FURTHER], [OUTRACED, FURTHER], [FURTHER]),
    ([OUTRACED], [COMPLETE], [OUTRACED, COMPLETE], [COMPLETE]),
    *(([FAILED], [other], [FAILED, other], [other]) for other in (COMPLETE, OUTRACED)),
    ([OUTRACED], [OUTRACED, FAILED], [OUTRACED, FAILED], [OUTRACED, FAILED]),
    ([FAILED], [ran("failed", 16)], [FAILED], [ran("failed", 16)]),
]


@pytest.mark.parametrize(
    ("ours", "theirs", "here_after", "there_after"),
    ATTEMPTS[:2] + [pytest.param(*each, marks=pytest.mark.long) for each in ATTEMPTS[2:]],
    ids=lambda each: "-".join(f"{r.status}{r.steps_run}" for r in each),
)
def test_the_attempt_that_tells_more_is_added_as_a_later_one(
    tmp_path, ours, theirs, here_after, there_after
):
    ends = []
    for into, expected in ((0, here_after), (1, there_after)):
        urls = [f"sqlite:///{tmp_path}/{into}-{i}.db" for i in (0, 1)]
        for url, results in zip(urls, (ours, theirs), strict=True):
            written(url, {A: results})
        target, other = urls[into], urls[1 - into]
        assert merged(target, other)["fake"].conflicts == {}
        assert attempts(target) == [(r.status, r.steps_run) for r in expected]
        once = rows(target)
        merged(target, other)
        assert rows(target) == once
        ends.append([(r.status, r.steps) for r in told(target)[A]])
    assert ends[0] == ends[1]


def test_an_attempt_on_a_faster_machine_is_added_although_it_took_fewer_seconds(here, there):
    for url, status, to, seconds in ((here, "outraced", 160, 0.1), (there, "complete", 320, 0.01)):
        attempt = ran(status, to)
        curve = {**attempt.curve, "seconds": [seconds * step for step in attempt.curve["step"]]}
        attempt = dataclasses.replace(attempt, curve=curve, unit=SECONDS)
        written(url, {A: [attempt]}, goal=Goal(0.1, unit="seconds"), race_factor=2.0)
    assert merged(here, there)["fake"].conflicts == {}
    assert attempts(here) == [("outraced", 160), ("complete", 320)]
    assert told(here)[A][0].cost == pytest.approx(3.2)


def test_an_attempt_that_failed_here_does_not_contradict_another(here, there):
    """It has no validations."""
    written(here, {A: [ran("failed", 0)]})
    written(there, {A: [ran("outraced", 32)]})
    assert merged(here, there)["fake"].conflicts == {}
    assert attempts(here)[1:] == [("outraced", 32)]


def test_what_ended_otherwise_stays_as_it_is_here_and_is_told(here, there):
    points = [
        COMPLETE,
        ran("complete", 96, point=1),
        ran("incomplete", 96, point=2),
        ran("outraced", 96, point=3),
    ]
    others = [OTHERWISE, ran("complete", 96, 0.4, point=1), ran("complete", 80, 0.4, point=2)]
    others += [ran("complete", 80, 0.4, point=3), ran("complete", 16, 0.4, point=4)]
    written(here, {A: points})
    written(there, {A: others})
    before = attempts(here)
    for taken, known in ((1, 0), (0, 1)):
        said = lines("fake", merged(here, there)["fake"])
        counts, conflict = said
        assert numbers_in(counts) == [taken, known, 4]
        # Trials that differ, the first point, and how many of them have another K.
        assert conflict.startswith(f"  {A}: ") and there in conflict
        assert numbers_in(conflict.replace(there, ""))[-3:] == [4, 0, 3]
        assert attempts(here) == [*before, ("complete", 16)]


def test_a_point_of_other_metaparameters_is_a_conflict_and_one_rounded_otherwise_is_not(
    here, there
):
    params = {key: 0.6 for key in SPACE}
    for url, factor in ((here, 1.0), (there, 1 + 1e-15)):
        moved = {key: value * factor for key, value in params.items()}
        other = params if url == here else {key: 0.7 for key in SPACE}
        written(url, {A: [result(A, 0, 16, params=moved), result(A, 1, 16, params=other)]})
    done = merged(here, there)["fake"]
    assert (done.added, done.unchanged, [each.point for each in done.conflicts[A]]) == (0, 1, [1])


def test_another_identity_is_refused_and_no_study_is_changed(here, there, tmp_path):
    for url, error in ((here, 0.1), (there, 0.2)):
        written(url, {A: [ran("complete", 32)]}, "same", identity={"goal": {"error": 0.1}})
        written(url, {A: [ran("complete", 32)]}, "z-other", identity={"goal": {"error": error}})
    written(there, {B: [ran("complete", 32, cell=B)]}, "new")
    before = rows(here)
    with pytest.raises(StudyChanged) as caught:
        merged(here, there)
    assert caught.value.keys == ("goal.error",)
    assert all(each in str(caught.value) for each in ("z-other", "there.db", "here.db"))
    assert rows(here) == before
    third = tmp_path / "third.db"
    with pytest.raises(StudyChanged) as caught:
        merged(f"sqlite:///{third}", here, there)
    assert caught.value.keys == ("goal.error",)
    assert not third.exists()
    assert list(merged(here, there, only="same")) == ["same"]


def written_at(url: str, noise: float, *digests: str | list[str]) -> None:
    """Write a study of one value of an axis of the data; each run has the hashes of its data."""
    cell = Cell(4, 0.0, (("data.noise", noise),))
    environments = []
    for i, digest in enumerate(digests):
        hashes = [digest] if isinstance(digest, str) else digest
        data = {f"noise={noise}": hashes}
        environments.append({"key": f"{i} of {noise}", "since": "", DATA: data})
    written(
        url,
        {cell: [ran("complete", 32, cell=cell)]},
        identity={**IDENTITY, "data_digest": digests[0]},
        axes={"data.noise": [noise]},
        environments=environments,
    )


def test_parts_with_other_values_of_an_axis_of_the_data_are_merged(here, there):
    written_at(here, 0.5, "a")
    written_at(there, 8.0, "b")
    assert merged(here, there)["fake"].added == 1
    assert read_study(here, "fake").axes == {"data.noise": (0.5, 8.0)}


def test_parts_with_other_data_at_one_value_of_an_axis_are_refused(here, there):
    written_at(here, 0.5, "a")
    written_at(there, 0.5, "b")
    before = rows(here)
    with pytest.raises(StudyChanged) as caught:
        merged(here, there)
    assert caught.value.keys == ("data_digest",) and "noise=0.5" in str(caught.value)
    assert rows(here) == before


X1, X2, Y3 = ["i", "f1", "X"], ["i", "f2", "X"], ["i", "f3", "Y"]
UNKNOWN = ["unknown"]


@pytest.mark.parametrize(
    ("ours", "theirs", "is_merged"),
    [
        ([X1], [Y3], True),  # floats of two processors are not compared
        ([X1], [X2, Y3], False),  # floats of one processor are
        ([X1], [X2, X1], True),
        (["a"], ["b", "a"], True),
        (["a"], ["b", UNKNOWN], False),
        (["a"], [UNKNOWN], True),
    ],
)
@pytest.mark.parametrize("is_exchanged", [False, True])
def test_data_at_one_value_are_compared_alike_in_both_directions(
    here, there, ours, theirs, is_merged, is_exchanged
):
    written_at(here, 0.5, *(theirs if is_exchanged else ours))
    written_at(there, 0.5, *(ours if is_exchanged else theirs))
    if is_merged:
        merged(here, there)
        assert read_study(here, "fake").name == "fake"
    else:
        with pytest.raises(StudyChanged, match=r"noise=0\.5"):
            merged(here, there)


def test_a_study_whose_data_have_a_digest_is_not_merged_with_one_without(here, there):
    written(here, {A: [ran("complete", 32)]}, identity={**IDENTITY, "data_digest": "a"})
    written(there, {A: [ran("complete", 48)]}, identity={**IDENTITY, "data_digest": None})
    for target, other in permutations((here, there)):
        with pytest.raises(StudyChanged) as caught:
            merged(target, other)
        assert caught.value.keys == ("data_digest",)


def test_a_cell_of_a_study_that_was_deleted_is_no_place_for_others(here, there):
    for url in (here, there):
        written(url, {A: [ran("complete", 32)]})
    cell = optuna.load_study(study_name=cell_study_name("fake", A), storage=here)
    cell.set_user_attr("uid", "an earlier one")
    optuna.delete_study(study_name="fake", storage=here)
    before = rows(here)
    with pytest.raises(WrongCell) as caught:
        merged(here, there)
    assert caught.value.keys == ("uid",)
    assert rows(here) == before


def test_a_running_study_goes_on_and_reruns_nothing_that_came(here, there, monkeypatch):
    stores = []
    for url in (here, there):
        written(url, {A: []}, race_factor=2.0, trials=4)
        stores.append(
            TrialQueue(
                url, "fake", [A], 4, SobolSampler(SPACE, 0), 0, AttemptRules(GOAL), race_factor=2.0
            )
        )
    working, elsewhere = stores
    mine = next(asked := trials_of(working))  # the others wait
    ends = [ran("complete", 96), ran("complete", 32), ran("outraced", 64), ran("failed", 16)]
    for trial in trials_of(elsewhere):
        elsewhere.store_result(dataclasses.replace(ends[trial.point], trial=trial))
    locked = []

    def watched(*args):
        return locked.append(peers(here).lock("storage").is_locked) or extend(*args)

    monkeypatch.setattr(merging, "extend", watched)
    assert merged(here, there)["fake"].added == 4
    assert locked == [True]
    working.store_result(dataclasses.replace(ends[0], trial=mine))
    assert (again := next(asked)).point == 3, "a failed one waits on"
    working.store_result(dataclasses.replace(ran("complete", 48), trial=again))
    assert next(asked, None) is None
    assert [(r.trial.point, r.steps) for r in told(here)[A]] == [
        (0, None),
        (1, 32),
        (2, None),
        (3, 48),
    ]
