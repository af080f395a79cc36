"""A search box that is widened: how far, where the new points lie, and how it is stored, gone on
with and merged."""

from __future__ import annotations

import dataclasses
import shutil

import pytest

from lit_dps.analysis.analysis import Analysis
from lit_dps.core.attempt import AttemptRules
from lit_dps.core.config import StorageConfig, StudyConfig
from lit_dps.core.errors import UserError
from lit_dps.core.goal import Goal
from lit_dps.core.search_space import (
    ExpandedSpace,
    Range,
    expand_range,
    expand_space,
    is_continuation,
    is_inside,
)
from lit_dps.core.trial import Cell, Status, TrialResult
from lit_dps.storage.database import open_storage
from lit_dps.storage.header import StudyChanged, declare
from lit_dps.storage.read import read_study
from lit_dps.storage.samplers import SobolSampler, boxed_point, sobol_point
from lit_dps.storage.stored_format import study_attributes
from lit_dps.storage.trial_queue import TrialQueue
from lit_dps.study.expand_space import with_stored_space
from tests.support.errors import refuses
from tests.support.runs import trials_of
from tests.unit.storage.test_creation_killed import killed_after
from tests.unit.storage.test_merge import merged
from tests.unit.study.test_grid import setup

RATE, MOMENTUM = "model.learning_rate", "model.momentum"
SPACE = {RATE: Range(1e-2, 1.0, "log"), MOMENTUM: Range(0.5, 0.995, "reverse_log")}
GOAL = Goal(0.1, check_interval=16, max_steps=960)


@pytest.mark.parametrize(
    ("box", "ends", "low", "high"),
    [
        (Range(1e-2, 1.0, "log"), ["high"], 1e-2, 10.0),
        (Range(1e-2, 1.0, "log"), ["low", "high"], 1e-3, 10.0),
        (Range(0.9, 0.99, "reverse_log"), ["high"], 0.9, 1 - 0.01 * 0.1**0.5),
        (Range(0.0, 0.99, "reverse_log"), ["low"], 0.0, 0.99),
        (Range(0.0, 4.0), ["low", "high"], 0.0, 6.0),
        (Range(-1.0, 1.0), ["low"], -2.0, 1.0),
        (Range(0.1, 0.9), ["low", "high"], 0.0, 0.95),
        (Range(16, 64, "log", True), ["low", "high"], 8, 128),
        (Range(1, 4, "linear", True), ["low"], 1, 4),
        (Range(0, 8, "linear", True), ["low", "high"], 0, 12),
        (Range(-2, 2, "linear", True), ["low"], -4, 2),
    ],
)
def test_an_end_moves_by_half_of_the_width_on_its_scale(box, ends, low, high):
    found = expand_range(box, ends)
    assert (found.low, found.high) == pytest.approx((low, high))
    found.check("study.space.x")


def test_a_worker_leaves_the_points_of_an_expanded_space_to_the_later_run(tmp_path):
    """A worker would draw them from its own space, which is the former one."""
    url, cell = f"sqlite:///{tmp_path}/study.db", Cell(4)
    history = [expand_space(SPACE, {RATE: {"high"}}, 4)]

    def opened(points: int, spaces=()) -> TrialQueue:
        return TrialQueue(
            url, "s", [cell], points, SobolSampler(SPACE, 5, history=spaces), 5, AttemptRules(GOAL)
        )

    former, later = opened(4), opened(history[0].end, history)
    running = [former.claim_next().trial for _ in range(3)]
    last = former.claim_next()
    first_of_later = later.claim_next().trial  # enqueues all points that it adds
    assert first_of_later.point == 4 and not is_inside(SPACE, first_of_later.params)
    # Point 3 waits again, behind the points of the expanded space.
    former.release_claims()
    again = [run.trial for run in iter(former.claim_next, None)]
    assert sorted(trial.point for trial in again) == [0, 1, 2, 3]
    assert {t.point: t.params for t in again} == {t.point: t.params for t in [*running, last.trial]}
    rest = [run.trial for run in iter(later.claim_next, None)]
    assert [trial.point for trial in rest] == list(range(5, history[0].end))
    assert rest and not any(is_inside(SPACE, trial.params) for trial in rest)


def test_new_points_are_as_dense_as_the_old_ones_and_outside_of_them():
    assert (
        expand_space(SPACE, {}, 20) is None
        and expand_space({RATE: Range(0.0, 2.0)}, {RATE: {"low"}}, 20) is None
    )
    one = expand_space(SPACE, {RATE: {"high"}}, 20)
    assert (one.first, one.end) == (20, 30), "half of the width, half of the points"
    two = expand_space(one.space, {MOMENTUM: {"low"}, RATE: {"high"}}, 30)
    assert two.space[RATE].high == pytest.approx(10 ** (1 + 1.5)) and two.space[MOMENTUM].low < 0.5
    points = [boxed_point(SPACE, [one, two], 3, i) for i in range(two.end + 40)]
    assert points[:20] == [sobol_point(SPACE, 3, i) for i in range(20)], (
        "those that were there stay"
    )
    assert not any(is_inside(SPACE, p) for p in points[20:30]) and all(
        is_inside(one.space, p) for p in points[:30]
    )
    assert not any(is_inside(one.space, p) for p in points[30 : two.end]) and all(
        is_inside(two.space, p) for p in points
    )
    assert 8 <= sum(is_inside(one.space, p) for p in points[two.end :]) <= 32, "then all of the box"
    assert len({p[RATE] for p in points}) == len(points), "no point twice"


def config(**kw) -> StudyConfig:
    grid = {
        "name": "s",
        "batch_sizes": [4, 8],
        "sparsities": [0.0],
        "trials": 8,
        "space": SPACE,
        "race_factor": None,
    }
    return StudyConfig(**grid | {"seed": 3} | kw)


def run(url: str, study: StudyConfig, spaces=()) -> list:
    """Runs what is left: the higher the rate, the sooner."""
    declare(url, study, "w", GOAL, {"a": 1}, {}, spaces)
    sampler = SobolSampler(study.space, 3, True, spaces)
    ran, s = [], TrialQueue(url, "s", study.cells, study.trials, sampler, 3, AttemptRules(GOAL))
    for trial in trials_of(s):
        ran.append(trial)
        steps = 16 * max(2, min(60, round(60 / (1 + trial.params[RATE]))))
        s.store_result(
            TrialResult(
                trial,
                Status.COMPLETE,
                steps,
                {"step": [steps], "val_error": [0.1], "train_loss": [1.0]},
            )
        )
    return ran


def of(tmp_path, study: StudyConfig):
    return dataclasses.replace(setup({}), study=study, storage=StorageConfig(folder=str(tmp_path)))


def test_a_study_is_widened_gone_on_with_and_widened_again(tmp_path, capsys):
    url, study = StorageConfig(folder=str(tmp_path)).optuna_url, config(trials=16)
    with refuses(f"{tmp_path}/study.db", error=UserError):
        with_stored_space(of(tmp_path, study), True)
    assert with_stored_space(of(tmp_path, study), False).spaces == ()
    run(url, study)
    before = read_study(url, "s")
    assert Analysis(before).cells[0].boundary[RATE] == "high"
    assert study_attributes(open_storage(url), "s")["space_history"] == [] and before.spaces == ()
    wider = with_stored_space(of(tmp_path, study), True)
    assert wider.identity(None) == of(tmp_path, study).identity(None), (
        "the first box is the identity's"
    )
    assert f"{RATE} {wider.space[RATE]}" in capsys.readouterr().err
    ran = run(url, wider.study, wider.spaces)
    new = range(16, wider.study.trials)
    assert {(t.cell, t.point) for t in ran} == {(Cell(b), p) for b in (4, 8) for p in new} and len(
        new
    ) >= 8
    assert all(not is_inside(SPACE, t.params) for t in ran)
    record = read_study(url, "s")
    assert record.space == wider.space and record.results[Cell(4)][:16] == before.results[Cell(4)]

    plain = with_stored_space(of(tmp_path, study), False)
    assert (plain.spaces, plain.study.trials) == (wider.spaces, wider.study.trials)
    assert run(url, plain.study, plain.spaces) == [], "the plain command goes on with it"
    more = with_stored_space(of(tmp_path, config(trials=40)), False)
    declare(url, more.study, "w", GOAL, {"a": 1}, {}, more.spaces)
    with refuses("--extend-space", 32, error=UserError):
        with_stored_space(of(tmp_path, study), True)
    run(url, more.study, more.spaces)
    again = with_stored_space(of(tmp_path, study), True)
    assert len(again.spaces) == 2 and again.spaces[1].first == 40


def test_an_adaptive_sampler_has_no_box_to_fill(tmp_path):
    run(StorageConfig(folder=str(tmp_path)).optuna_url, config())
    with refuses("study.sampler", "tpe", error=UserError):
        with_stored_space(of(tmp_path, config(sampler="tpe")), True)


def test_histories_merge_where_one_goes_on_from_the_other(tmp_path):
    urls = [f"sqlite:///{tmp_path}/{name}.db" for name in ("one", "two", "three")]
    box, other = (
        expand_space(SPACE, {key: {end}}, 8) for key, end in ((RATE, "high"), (MOMENTUM, "low"))
    )
    for url, spaces in zip(urls, ((), (box,), (other,)), strict=True):
        run(url, config(trials=spaces[-1].end if spaces else 8, batch_sizes=[4]), spaces)
    merged(urls[0], urls[1])
    record = read_study(urls[0], "s")
    assert record.spaces[1:] == (box,) and len(record.results[Cell(4)]) == 12
    with pytest.raises(StudyChanged) as caught:
        merged(urls[0], urls[2])
    assert caught.value.keys == ("space_history",)
    rounded = [ExpandedSpace.from_dict(box.to_dict()).to_dict()]
    rounded[0]["space"][RATE]["high"] *= 1 + 1e-14
    assert (
        is_continuation(rounded, [box.to_dict()])
        and is_continuation([], rounded)
        and not is_continuation(rounded, [other.to_dict()])
    )


def test_a_side_with_points_of_the_old_box_where_the_other_widened_it_is_refused(tmp_path):
    urls = [f"sqlite:///{tmp_path}/{name}.db" for name in ("one", "two")]
    box = expand_space(SPACE, {RATE: {"high"}}, 8)
    run(urls[0], config(trials=9, batch_sizes=[4]))
    run(urls[1], config(trials=box.end, batch_sizes=[4]), (box,))
    for one, other in (urls, urls[::-1]):
        with pytest.raises(StudyChanged) as caught:
            merged(one, other)
        assert caught.value.keys == ("space_history",)
    with pytest.raises(StudyChanged):
        declare(urls[0], config(trials=box.end), "w", GOAL, {"a": 1}, {}, (box,))
    assert read_study(urls[0], "s").spaces == ()


def test_a_kill_while_an_expansion_is_stored_leaves_a_study_that_resumes(tmp_path):
    box = expand_space(SPACE, {RATE: {"high"}}, 8)
    run(f"sqlite:///{tmp_path}/whole.db", config())
    moment = 1
    kept = []
    while True:
        file = tmp_path / f"{moment}.db"
        shutil.copy(tmp_path / "whole.db", file)
        url = f"sqlite:///{file}"
        wider = config(trials=box.end)

        def extend(url=url, study=wider):
            declare(url, study, "w", GOAL, {"a": 1}, {"new": 1}, (box,))

        if not killed_after(moment, extend):
            break
        record = read_study(url, "s")
        kept.append((record.trials, record.spaces[1:]))
        extend()
        record = read_study(url, "s")
        assert (record.trials, record.spaces[1:]) == (box.end, (box,))
        moment += 1
    assert kept and all(each == (8, ()) for each in kept)
