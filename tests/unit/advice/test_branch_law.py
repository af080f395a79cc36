"""Steps of other batch sizes from critical ones along a run, and the answer that they give with
step times."""

from __future__ import annotations

import math

import pytest

from lit_dps.advice.answer import answer
from lit_dps.advice.branch_law import Branched, CriticalRange
from lit_dps.advice.costs import Checks, Costs
from lit_dps.advice.step_time import Timed, fit_step_time
from lit_dps.advice.text import render
from tests.support.errors import raises_about

FORKS = [CriticalRange(10, 32, 64), CriticalRange(50, 64, 128)]
LINE = fit_step_time([Timed(m, 0.01 + 1e-4 * m) for m in (8, 16, 64, 256)])


def test_up_to_the_critical_batch_size_nothing_is_lost_and_beyond_it_steps_are_those_of_it():
    found = (
        Branched(32, 100, FORKS, 128, met=True)
        .predict([16, 32, 64, 128, 256])
        .set_index("batch_size")
    )
    assert found["known"].tolist() == ["refused", "branched", "branched", "branched", "refused"]
    assert found.loc[32, ["low", "steps", "high"]].tolist() == [100, 100, 100]
    # 10 steps of 32 up to the first fork, with a critical size from 32 to that of the fork; then 40,
    # whose critical size is between 32 and 64; then 50 more, none lost at 64
    first = 10 / 2**0.25
    assert found.loc[64, "low"] == 50 and found.loc[64, "high"] == 50 + 25
    assert found.loc[64, "steps"] == pytest.approx(first + 40 / math.sqrt(2) + 25)
    assert found.loc[128, "low"] == 25 and found.loc[128, "high"] == 50 + 25
    assert found.loc[128, "steps"] == pytest.approx(first + 40 / math.sqrt(2) + 25 / math.sqrt(2))


def test_forks_after_the_goal_say_nothing_of_the_way_to_it():
    early = Branched(32, 40, FORKS, 128, met=True).predict([128]).iloc[0]
    alone = Branched(32, 40, FORKS[:1], 128, met=True).predict([128]).iloc[0]
    assert early.equals(alone)


def test_where_no_branch_surely_loses_the_largest_one_limits_the_expected_steps():
    found = Branched(8, 64, [CriticalRange(4, 8, math.inf)], 32, met=True)
    row = found.predict([32]).iloc[0]
    assert (
        row["steps"] == pytest.approx(4 / math.sqrt(2) + 60 / 2)
        and row["high"] == 64
        and row["low"] == 16
    )
    assert found.notes == []


def test_where_all_branches_held_the_speed_up_is_perfect_from_the_first_fork_on(golden):
    found = Branched(8, 64, [CriticalRange(4, 32, math.inf)], 32, met=False)
    assert found.predict([32]).iloc[0][["low", "steps", "high"]].tolist() == [16, 17, 19]
    assert found.predict([64]).iloc[0]["known"] == "refused"
    assert len(found.notes) == 2
    assert set(found.notes) <= set(answer(found, LINE, [8, 16, 32]).assumed)
    golden.check("advice/branches-without-goal.txt", render(answer(found, LINE, [8, 16, 32])))


def test_the_answer_has_times_and_the_rate_of_the_branches(golden):
    forks = Branched(32, 100, FORKS, 128, met=True)
    rate = forks.rate("model.lr", 0.1, adaptive=False)
    assert [rate.at(b) for b in (32, 64, 256)] == [pytest.approx(0.1), pytest.approx(0.2), None]
    assert forks.rate("model.lr", 0.1, adaptive=True).at(128) == pytest.approx(0.2)
    found = answer(
        forks, LINE, [16, 32, 64, 128, 256], costs=Costs(checks=Checks(0.1, 10)), rate=rate
    )
    assert found.table["batch_size"].tolist() == [32, 64, 128]
    row = found.table.iloc[1]
    assert row["hours"] == pytest.approx(row["steps"] * (0.01 + 64e-4 + 0.01) / 3600, rel=1e-3)
    assert row["hours_low"] < row["hours"] < row["hours_high"]
    golden.check("advice/branches.txt", render(found))
    with raises_about(ValueError, 0, 100):
        Branched(32, 100, [], 128, met=True)
