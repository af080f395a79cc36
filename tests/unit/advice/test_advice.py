"""The answer: times, costs, the front, the interval of batch sizes, and what it says it rests
on."""

import dataclasses
import math

import numpy as np
import pytest

from lit_dps.advice.answer import ASKED, KNOWN, answer
from lit_dps.advice.costs import Checks, Costs
from lit_dps.advice.step_time import Link, Timed, fit_step_time
from lit_dps.advice.text import MAX_ROWS, render
from lit_dps.analysis.law import fit_law
from lit_dps.analysis.observations import Observation
from lit_dps.analysis.rates import rate_law
from lit_dps.report.figures.advice import draw_advice
from tests.support.errors import raises_about
from tests.support.texts import figure_texts

BATCH = [8, 16, 32, 64, 128, 256, 512, 1024]
LAW = fit_law([Observation(b, 4e4 / b + 200) for b in BATCH])
LINE = fit_step_time([Timed(m, 0.01 + 1e-4 * m) for m in (8, 16, 64, 256)])


def test_times_and_costs_are_those_of_law_and_step():
    costs = Costs(price=2.0, checks=Checks(seconds=1.0, interval=100))
    found = answer(LAW, LINE, BATCH, costs=costs)
    row = found.table.iloc[3]
    seconds = (4e4 / 64 + 200) * (0.01 + 64e-4 + 0.01)
    assert row["hours"] == pytest.approx(seconds / 3600, rel=1e-4)
    assert row["cost"] == pytest.approx(2 * seconds / 3600, rel=1e-4)
    assert row["hours_low"] < row["hours"] < row["hours_high"]
    assert row["examples"] == pytest.approx(4e4 + 200 * 64, rel=1e-4)


def test_steps_are_those_of_a_further_run_where_k_is_the_least_of_several():
    lucky = [Observation(b, (4e4 / b + 200) * math.exp(-0.13), luck=0.13) for b in BATCH]
    found = answer(fit_law(lucky), LINE, BATCH)
    steps = 4e4 / found.table["batch_size"] + 200
    assert found.table["steps"].to_numpy() == pytest.approx(steps.to_numpy(), rel=1e-4)
    assert sum("plus up to 14 %" in line for line in found.assumed) == 1
    assert not any("plus up to" in line for line in answer(LAW, LINE, BATCH).assumed)


def test_the_fastest_batch_size_is_that_of_calculus():
    # (c1 / B + c2) (a + b B) is least at B = sqrt(c1 a / (c2 b)) = 141
    found = answer(LAW, LINE, BATCH)
    assert found.fastest["batch_size"] == 128
    low, high = found.interval
    optimum = math.sqrt(4e4 * 0.01 / (200 * 1e-4))

    def time(b):
        return (4e4 / b + 200) * (0.01 + 1e-4 * b)

    assert low < optimum < high
    for end in (low, high):
        assert time(end) == pytest.approx(1.1 * time(optimum), rel=0.03)
    assert found.cut == ("", "")


@pytest.mark.parametrize("sizes", [BATCH, BATCH[:4]])
def test_the_interval_ends_at_the_largest_size_asked_for_only_if_that_has_a_time(sizes):
    """Batches above 64 do not fit, and may not be accumulated."""
    step = dataclasses.replace(LINE, largest=64, can_accumulate=False)
    found = answer(LAW, step, sizes)
    assert found.interval[1] == 64
    assert found.cut == ("", ASKED if sizes[-1] == 64 else KNOWN)
    assert f"to 64, the largest {found.cut[1]}" in " ".join(render(found).split())


def test_an_accumulated_batch_is_within_the_interval():
    """Each batch has two parts. A prime number of examples would have a part for each example."""
    step = dataclasses.replace(
        fit_step_time([Timed(m, 0.01 + 1e-4 * m) for m in (4, 512)]), least_parts=2
    )
    found = answer(LAW, step, [8 * 2**i for i in range(9)])
    low, high = found.interval
    assert low < found.best["batch_size"] < high
    # (4e4 / B + 200) (0.02 + 1e-4 B) is 16 s at least, at B = 200, and 10 % more at these.
    assert low == pytest.approx(107, rel=0.15) and high == pytest.approx(373, rel=0.15)


def test_the_front_is_what_nothing_beats():
    timed = [Timed(m, 0.01 + 1e-4 * m) for m in (8, 32, 128, 512)]
    step = fit_step_time(timed, link=Link(parameters=10**6, bandwidth=1e10))
    found = answer(LAW, step, BATCH, devices=(1, 2, 4, 8))
    table = found.table
    for _, row in table.iterrows():
        beaten = (
            (table["hours"] < row["hours"]) & (table["device_hours"] < row["device_hours"])
        ).any()
        assert not (row["pareto"] and beaten)
        assert (
            row["pareto"]
            or (
                (table["hours"] <= row["hours"]) & (table["device_hours"] <= row["device_hours"])
            ).sum()
            > 1
        )
    assert set(table.loc[table["devices"] > 1, "step_known"]) == {"predicted"}
    assert sum(str(step.link) in line for line in found.assumed) == 1
    assert found.best["hours"] <= 1.1 * found.fastest["hours"]
    assert found.best["device_hours"] <= found.fastest["device_hours"]


def test_without_a_link_several_devices_are_left_out():
    assert set(answer(LAW, LINE, BATCH, devices=(1, 4)).table["devices"]) == {1}


def test_steps_below_one_check_interval_are_one_interval_and_no_number():
    """K = 1600 / B + 5 is below 20 from B = 128."""
    sizes = [16, 32, 64, 128, 256, 512]
    law = fit_law([Observation(float(b), 1600 / b + 5, noise=0.02) for b in sizes])
    flat = fit_step_time([Timed(m, 0.01 + 1e-6 * m) for m in (1, 8, 64, 512)])
    result = answer(law, flat, sizes, costs=Costs(checks=Checks(0.0, 20.0)))
    rows = result.table.set_index("batch_size")
    assert (rows.loc[[256, 512], "steps"] == 20).all()
    assert (rows["steps_low"] >= 20).all()
    assert rows.loc[512, "hours"] == pytest.approx(20 * rows.loc[512, "step_seconds"] / 3600)
    text = " ".join(render(result).split())
    assert "at most one check interval (20 steps)" in text
    assert "512 <= 20 10" in text and "<= at most one check interval" in text
    assert "<=" not in render(answer(law, flat, sizes))
    # Limits on both sides of the first check are no bound.
    noisy = fit_law([Observation(float(b), 1600 / b + 5, noise=0.5) for b in sizes])
    result = answer(noisy, flat, sizes, costs=Costs(checks=Checks(0.0, 20.0)))
    row = result.table.set_index("batch_size").loc[128]
    assert row["steps"] == 20 < row["steps_high"]
    assert "128 <= 20" not in " ".join(render(result).split())


def test_a_refused_law_answers_at_what_was_measured_alone(golden):
    law = fit_law(
        [Observation(b, k) for b, k in zip((8, 16, 32, 64), (900, 480, 250, 400), strict=True)]
    )
    found = answer(law, LINE, [8, 12, 32, 64, 128])
    assert found.table["batch_size"].tolist() == [8, 32, 64]
    assert found.best["batch_size"] == 32
    golden.check("advice/refused.txt", render(found))


def test_whole_texts(golden):
    rate = rate_law(BATCH[:4], [0.01 * math.sqrt(b) for b in BATCH[:4]])
    costs = Costs(price=3.0, checks=Checks(0.1, 10))
    golden.check("advice/rate.txt", render(answer(LAW, LINE, BATCH[:4], costs=costs, rate=rate)))
    golden.check("advice/extrapolated.txt", render(answer(LAW, LINE, [8, 4096])))
    link = Link(10**6, 1e10)
    step = fit_step_time([Timed(m, 0.01 + 1e-4 * m) for m in (8, 32, 128)], link, largest=256)
    found = answer(LAW, step, BATCH, devices=(1, 2, 4, 8))
    assert len(found.table) > MAX_ROWS
    golden.check("advice/devices.txt", render(found))
    assert render(found, all_rows=True).count("\n") > render(found).count("\n")


def test_a_file_has_the_limits_of_a_table_of_any_width():
    rate = rate_law(BATCH[:4], [0.01 * math.sqrt(b) for b in BATCH[:4]])
    rate = dataclasses.replace(rate, name="rate_of_the_network_of_the_decoder_and_its_head")
    costs = Costs(price=3.0, checks=Checks(0.1, 10))
    found = answer(LAW, LINE, BATCH[:4], costs=costs, rate=rate)
    in_file, in_terminal = render(found), render(found, terminal=100)
    rows = [
        next(line for line in text.splitlines() if line.endswith("recommended"))
        for text in (in_file, in_terminal)
    ]
    assert len(rows[0]) > 100 >= len(rows[1])
    assert "[" in rows[0] and "[" not in rows[1]
    assert "limits" not in in_file


@pytest.mark.parametrize("width", [60, 80, 100])
def test_a_narrow_terminal_has_fewer_details_and_no_longer_lines(width):
    rate = rate_law(BATCH[:4], [0.01 * math.sqrt(b) for b in BATCH[:4]])
    step = fit_step_time([Timed(m, 0.01 + 1e-4 * m) for m in (8, 32, 128)], Link(10**6, 1e10))
    costs = Costs(price=3.0, checks=Checks(0.1, 10))
    found = answer(LAW, step, BATCH, devices=(1, 2, 4, 8), costs=costs, rate=rate)
    text = render(found, terminal=width, file="answer.csv")
    assert max(map(len, text.splitlines())) <= width
    (head,) = [line for line in text.splitlines() if line.split()[:2] == ["B", "devices"]]
    assert ("a step" in head) == (width > 60)
    recommended = next(line for line in text.splitlines() if line.endswith("recommended"))
    assert recommended.split()[0] == f"{found.best['batch_size']}"
    assert ("[" in recommended) == (width == 100)
    assert ("answer.csv" in text) == (width < 100)
    assert "answer.csv" not in render(found, terminal=width)
    assert ("? predicted" in text) == (width > 60) and "? assumes" not in text
    # The first two sentences keep the limits.
    assert "[" in text.split("\n\n")[0]


def test_rates_follow_their_power_law_within_what_was_measured():
    batch = np.array([8, 32, 128])
    law = rate_law(batch, 0.1 * batch**0.7)
    assert law.exponent == pytest.approx(0.7)
    assert law.at(64) == pytest.approx(0.1 * 64**0.7)
    assert law.at(256) is None
    assert rate_law([8], [0.1]) is None
    with raises_about(ValueError, "rates"):
        rate_law([8, 16], [0.1, 0.0])


def test_the_figure_marks_what_is_predicted_and_what_is_recommended(golden):
    step = fit_step_time([Timed(m, 0.01 + 1e-4 * m) for m in (8, 32, 128)], link=Link(10**6, 1e10))
    found = answer(LAW, step, BATCH, devices=(1, 4), costs=Costs(price=2.0))
    figure = draw_advice(found.table, LAW.observations, found.best, found.price)
    steps, time, front = figure.axes
    golden.check("figures/advice.txt", figure_texts(figure))
    stars = [
        line.get_xydata()[0] for line in (*time.lines, *front.lines) if line.get_marker() == "*"
    ]
    seconds = 3600 * found.best["hours"]
    assert stars[0] == pytest.approx([found.best["batch_size"], seconds])
    assert stars[1] == pytest.approx([seconds, found.best["cost"]])
    hollow = sum(
        len(line.get_xdata()) for line in time.lines if line.get_markerfacecolor() == "white"
    )
    sure = (found.table["step_known"] == "fitted") & (found.table["steps_known"] == "law")
    assert hollow == (~sure).sum() > 0
    said = [text.get_text() for text in figure.legends[0].get_texts()]
    assert {"Pareto front", "recommended"} <= set(said)
    assert "recommended" not in [
        t.get_text() for t in draw_advice(found.table).legends[0].get_texts()
    ]
