"""The arithmetic of the benchmarks on made-up numbers, and that what they compare is the same."""

from __future__ import annotations

import json
import math

import pytest
import torch

from benchmarks import SECTIONS, workers
from benchmarks.checks import Checked, by_level
from benchmarks.machine import slug
from benchmarks.numbers import Bounds, Sample, growth, interleaved
from benchmarks.paper_cost import Cost, evenly, paper_steps, same_end
from benchmarks.raced import short_sample
from benchmarks.report import Report, Section, plain
from benchmarks.scaling import Series
from benchmarks.setups import middle_trial, paper_setup
from benchmarks.step import bare, engine, threads
from benchmarks.text import between, ratio, seconds, spread, table, times
from lit_dps.core.trial import Cell, Status, Trial, TrialResult


def ended(point: int, status: Status, steps: int) -> TrialResult:
    """A trial that ended so after so many steps."""
    k = steps if status is Status.COMPLETE else None
    return TrialResult(Trial(Cell(16, 0.0), point), status, k, {"step": [steps]})


COMPLETE, INFEASIBLE = ended(0, Status.COMPLETE, 160), ended(1, Status.INFEASIBLE, 48)
INCOMPLETE = ended(2, Status.INCOMPLETE, 1_600)
RACED = [ended(3, Status.OUTRACED, 160), ended(4, Status.OUTRACED, 320)]
RESULTS = [COMPLETE, INFEASIBLE, INCOMPLETE, *RACED]


def test_a_ratio_is_that_of_each_round():
    slow, base = Sample((3.0, 8.0, 2.0)), Sample((2.0, 4.0, 1.0))
    assert slow.over(base) == Sample((1.5, 2.0, 2.0))
    assert (slow.over(base).median, slow.over(base).low, slow.over(base).high) == (2.0, 1.5, 2.0)
    assert (slow.median, slow.mean, slow.low, slow.high) == (3.0, pytest.approx(13 / 3), 2.0, 8.0)
    with pytest.raises(ValueError):
        slow.over(Sample((1.0,)))


def test_variants_take_turns():
    calls = []

    def variant(name: str):
        return lambda: calls.append(name) or float(len(calls))

    found = interleaved({"a": variant("a"), "b": variant("b")}, 3)
    assert calls == ["a", "b"] * 3
    assert found == {"a": Sample((1.0, 3.0, 5.0)), "b": Sample((2.0, 4.0, 6.0))}


@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0, 2.0])
def test_the_exponent_of_a_power_is_found(exponent):
    sizes = (100, 1_000, 10_000)
    assert growth(sizes, [0.003 * n**exponent for n in sizes]) == pytest.approx(exponent)


def test_an_exponent_is_that_of_least_squares_in_logs():
    assert growth((1, 2, 4), (1, 4, 4)) == pytest.approx(1.0)  # logs 0 1 2 and 0 2 2: slope 1
    assert math.isnan(growth((5,), (1,)))
    series = Series("x", "y", (10, 1_000), (Sample((1.0, 2.0, 9.0)), Sample((20.0,))))
    assert series.exponent == pytest.approx(0.5)  # of the medians, 2 and 20
    assert (series.target, Series("x", "y", (), (), flat=False).target) == (0.1, 1.1)


def test_steps_of_outraced_trials_are_bounded_by_the_race_and_the_budget():
    assert paper_steps(RESULTS, 1_600) == Bounds(
        160 + 48 + 1_600 + 480, None, 160 + 48 + 1_600 + 3_200
    )


def test_calibrated_trials_stand_for_all_outraced_ones():
    calibrated = [ended(3, Status.INCOMPLETE, 1_600), ended(4, Status.COMPLETE, 800)]
    assert paper_steps(RESULTS, 1_600, calibrated).estimate == 160 + 48 + 1_600 + 2 * 1_200
    assert paper_steps(RESULTS, 1_600, calibrated[:1]).estimate == 160 + 48 + 1_600 + 2 * 1_600


def test_without_outraced_trials_the_steps_are_known():
    assert paper_steps([COMPLETE, INFEASIBLE], 1_600) == Bounds(208, 208, 208)


def test_bounds_add_and_divide():
    assert Bounds(1, 2, 4) + Bounds(10, 20, 40) == Bounds(11, 22, 44)
    assert Bounds(1, 2, 4) + Bounds(10, None, 40) == Bounds(11, None, 44)
    assert Bounds(1, None, 4).over(2) == Bounds(0.5, None, 2.0)
    assert Bounds(1, 2, 4).over(2) == Bounds(0.5, 1.0, 2.0)


def test_the_papers_time_is_that_of_its_trials_steps_and_checks_shared_by_the_workers():
    cost = Cost.of([(1.0, 0.01, 2.0), (3.0, 0.03, 4.0), (2.0, 0.02, 3.0)])
    assert cost.step == Sample((0.01, 0.03, 0.02))
    assert cost.seconds(5, 1_600, 16, 2) == pytest.approx((5 * 2.0 + 1_600 * 0.02 + 100 * 3.0) / 2)


def test_trials_are_chosen_evenly_by_point():
    results = [ended(point, Status.OUTRACED, 16) for point in (9, 8, 7, 6, 5, 4, 3, 2, 1, 0)]
    assert [r.trial.point for r in evenly(results, 2)] == [2, 7]
    assert [r.trial.point for r in evenly(results, 5)] == [1, 3, 5, 7, 9]
    assert [r.trial.point for r in evenly(results, 20)] == list(range(10))
    assert evenly(results, 0) == evenly([], 3) == []


def test_the_sample_has_the_best_trial_and_short_ones():
    assert short_sample(RESULTS, 0) == []
    assert [r.trial.point for r in short_sample(RESULTS, 9)] == [0, 1, 3, 4], (
        "point 2 ran ten times as long"
    )
    assert short_sample(RESULTS, 1) == [COMPLETE]
    assert short_sample([INCOMPLETE, INFEASIBLE], 2) == [INFEASIBLE]


def test_ends_are_the_same_where_status_and_steps_are():
    assert same_end(COMPLETE, ended(0, Status.COMPLETE, 160))
    assert not same_end(COMPLETE, ended(0, Status.COMPLETE, 144))
    assert not same_end(COMPLETE, ended(0, Status.INCOMPLETE, 160))
    assert same_end(INFEASIBLE, ended(1, Status.INFEASIBLE, 48))
    assert not same_end(INFEASIBLE, ended(1, Status.INFEASIBLE, 32))


def test_an_outraced_trial_is_one_that_had_not_met_the_goal():
    assert same_end(RACED[0], ended(3, Status.INCOMPLETE, 160))
    assert not same_end(RACED[0], ended(3, Status.COMPLETE, 160))
    assert not same_end(RACED[0], ended(3, Status.INFEASIBLE, 144))


def test_checks_are_put_together_by_the_error_that_was_reached():
    def check(error: float, full: float = 1.0) -> Checked:
        return Checked(16, error, full, 0.5, 100, True)

    levels = by_level((check(0.9), check(0.5, 3.0), check(0.04), check(0.03), check(0.0)))
    assert [(level.low, level.high, len(level.full.values)) for level in levels] == [
        *((0.5, 1.0, 1), (0.2, 0.5, 1), (0.03, 0.05, 1), (0.0, 0.03, 2))
    ]
    assert levels[1].ratio == Sample((6.0,))


def test_numbers_are_shown_with_their_spread():
    assert times(Sample((1.04, 1.1, 1.02))) == "x1.04 (x1.02 to x1.10)"
    assert seconds(Sample((0.002, 0.001, 0.003))) == "2.00 ms (1.00 ms to 3.00 ms)"
    assert spread(Sample((5.0,)), "{:.0f}".format) == "5"
    assert [ratio(x) for x in (0.5, 12.34, 4321.0)] == ["x0.500", "x12.3", "x4,321"]
    assert [
        between(bounds, str) for bounds in (Bounds(1, 2, 3), Bounds(1, None, 3), Bounds(1, 1, 1))
    ] == [*("2 (1 to 3)", "1 to 3", "1")]
    assert table(["a", "b"], [[1, "x"]]) == "| a | b |\n| ---: | ---: |\n| 1 | x |"


def test_a_machine_is_named_by_what_it_is():
    found = {
        "CPU": "Intel(R) Xeon(R) CPU E5-2690 v4 @ 2.60GHz",
        "cores": "2",
        "memory": "8 GiB",
        "GPU": "none",
    }
    assert slug(found) == "intel-xeon-e5-2690-v4-2-cores"
    assert slug({**found, "GPU": "NVIDIA H200"}) == "intel-xeon-e5-2690-v4-2-cores-nvidia-h200"


def section(name: str, value: float = 1.5) -> Section:
    numbers = plain({"ratio": Sample((value, 2.0, 3.0))})
    return Section(
        name,
        name.title(),
        f"x{value}",
        numbers,
        f"python -m benchmarks {name}",
        "abc",
        "2026-01-02",
        3.0,
        "0",
    )


def report(*names: str, torch_version: str = "2.15", value: float = 1.5) -> Report:
    here = {"CPU": "A CPU", "cores": "2", "memory": "4 GiB", "GPU": "none"}
    return Report(
        "2026-01-02", here, {"torch": torch_version}, {name: section(name, value) for name in names}
    )


def test_a_report_says_what_was_measured_where_and_by_which_command(tmp_path):
    report("step").write(tmp_path / "new" / "2026-01-02-a-cpu", SECTIONS)
    text = (tmp_path / "new" / "2026-01-02-a-cpu.md").read_text()
    for said in (
        "2026-01-02",
        "A CPU",
        "4 GiB",
        "GPU: none",
        "torch 2.15",
        "python -m benchmarks step",
        "x1.5",
        "abc",
    ):
        assert said in text
    numbers = json.loads((tmp_path / "new" / "2026-01-02-a-cpu.json").read_text())["sections"][
        "step"
    ]["numbers"]
    assert numbers == {"ratio": {"median": 2.0, "low": 1.5, "high": 3.0, "values": [1.5, 2.0, 3.0]}}


def test_sections_of_the_same_day_and_versions_stay(tmp_path):
    stem = tmp_path / "r"
    report("scaling", "step").write(stem, SECTIONS)
    report("step", value=1.25).write(stem, SECTIONS)
    stored = json.loads((tmp_path / "r.json").read_text())["sections"]
    assert list(stored) == ["step", "scaling"], "in the order of the report"
    assert stored["step"]["text"] == "x1.25"
    report("memory", torch_version="2.16").write(stem, SECTIONS)
    assert list(json.loads((tmp_path / "r.json").read_text())["sections"]) == ["memory"]


def test_numbers_become_plain_json():
    found = plain(Series("what", "size", (1, 2), (Sample((1.0,)),)))
    assert found["sizes"] == [1, 2]
    assert found["seconds"][0]["median"] == 1.0
    assert plain({1: math.inf, "a": (None, "b")}) == {"1": "inf", "a": [None, "b"]}


@pytest.mark.parametrize("sparsity", [0.0, 0.9])
def test_the_bare_loop_trains_what_the_engine_trains(sparsity):
    setup = paper_setup(quick=True)
    trial = middle_trial(setup, Cell(16, sparsity))
    with threads(1):
        _, alone = bare(setup, trial, 6, "cpu")
        for lean in (True, False):
            _, network = engine(setup, trial, 6, lean)
            for ours, theirs in zip(alone.parameters(), network.parameters(), strict=True):
                torch.testing.assert_close(ours, theirs)


def test_what_workers_can_gain_is_bounded_by_what_threads_give():
    ways, five = {(2, 1): 150.0, (1, 2): 100.0, (1, 1): 80.0}, Sample((5.0,))
    rows = tuple(
        workers.Row(16, 480, *way, Sample((r,)), Sample((r / 100,)), five)
        for way, r in ways.items()
    )
    shown = workers.show(workers.Workers("MNIST", 8, rows)).splitlines()
    assert (
        "| 16 | 480 | 2 | 1 | 150 (150 to 150) | x1.50 | x1.8: missed | x1.60 | 5.00 s |" in shown
    )
    assert "| 16 | 480 | 1 | 2 | 100 (100 to 100) | x1.00 |  |  | 5.00 s |" in shown
