"""The best rates and the price of scaling rules, of made-up trials whose steps depend on the rate
in a known way."""

import dataclasses
import math

import pytest

from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.rate_rules import price_rows
from lit_dps.analysis.rates import rate_source
from lit_dps.analysis.tables import records
from lit_dps.core.goal import Goal
from lit_dps.core.search_space import Range
from lit_dps.core.trial import Cell, Series
from lit_dps.report.figures import FIGURES, write_figures
from tests.support.fake_study import analysis_of, result
from tests.support.texts import numbers_in

FIGURE = next(figure for figure in FIGURES if figure.NAME == "rates")
GOAL = Goal(0.1, check_interval=1, max_steps=100_000)
SPACE = {
    "model.learning_rate": Range(1e-3, 10, "log"),
    "model.momentum": Range(0.5, 0.99, "reverse_log"),
}
SIZES = (4, 16, 64)
MOMENTUM = {"model": {"init_args": {"optimizer": "momentum"}}}


def trial(batch_size, point, effective, momentum, steps, status="complete", **kw):
    params = {"model.learning_rate": effective * (1 - momentum), "model.momentum": momentum}
    return result(Cell(batch_size, **kw.pop("cell", {})), point, steps, status, params, **kw)


def bowl(power, steps=lambda b: 4000 / b + 100, width=0.5):
    """Trials at effective rates 2^i at two momenta: K is least at 0.5 (B / 4)^power, and depends on
    that rate alone.

    Off by a factor f it is exp((log f)^2 width) times as much; the second momentum costs a tenth
    more.
    """
    results = {}
    for b in SIZES:
        best = 0.5 * (b / 4) ** power
        at = [(2.0**i, m) for i in range(-4, 6) for m in (0.9, 0.75)]
        results[Cell(b)] = [
            trial(
                b,
                i,
                x,
                m,
                round(
                    steps(b) * (1 if m == 0.9 else 1.1) * math.exp(width * math.log(x / best) ** 2)
                ),
            )
            for i, (x, m) in enumerate(at)
        ]
    return results


def study(results, config=MOMENTUM, space=SPACE, goal=GOAL, **kw):
    return analysis_of(results, goal=goal, space=space, config=config, **kw)


def rows(table, *names, **where):
    return [
        tuple(row[n] for n in names)
        for row in records(table)
        if all(row[k] == v for k, v in where.items())
    ]


def test_the_momentum_of_schedule_free_sgd_does_not_amplify_its_steps():
    arguments = {"optimizer": "schedule_free_sgd", "momentum": 0.9}
    record = study(bowl(0.5), {"model": {"init_args": arguments}}).record
    source = rate_source(record, record.series[0])
    assert source is not None and not source.has_momentum


@pytest.mark.parametrize("key", ["model.optimizer", "model.init_args.optimizer"])
def test_an_axis_of_optimizers_counts_however_it_is_spelled(key):
    record = study(bowl(0.5), {"model": {"init_args": {"optimizer": "sgd"}}}).record
    source = rate_source(record, Series(0.0, ((key, "adam"),)))
    assert source is not None and source.optimizer == "adam"


def test_the_range_of_rates_has_the_trial_of_another_statistic(monkeypatch):
    """K* is below the cost of its trial if it is the mean of many subsets, for example."""
    curve = study(bowl(0.5)).rate_curves[0]
    best = curve.best_trial(4)
    cells = {4: dataclasses.replace(curve.cells[4], k_star=best.cost / 2)}
    lower = dataclasses.replace(curve, cells=cells)
    assert lower.near(4) == [best]
    assert len(curve.near(4)) == 2 and any(each is best for each in curve.near(4))


def test_the_effective_rate_of_the_best_trial_and_both_rules():
    table = study(bowl(0.5)).rates
    assert rows(table, "batch_size", "k_star", "momentum") == [
        (4, 1100, 0.9),
        (16, 350, 0.9),
        (64, 162, 0.9),
    ]
    assert list(table["effective_rate"]) == pytest.approx([0.5, 1.0, 2.0])
    assert list(table["learning_rate"]) == pytest.approx([0.05, 0.1, 0.2])
    assert list(table["linear"]) == pytest.approx([0.5, 2.0, 8.0])
    assert list(table["square_root"]) == pytest.approx([0.5, 1.0, 2.0])
    assert list(table["scaled_from"]) == [4] * 3


def test_the_rates_of_trials_about_as_good_as_the_best():
    """exp(0.5 log(2)^2) = 1.27 is beyond 1.25 K*, 1.1 is not: the other momentum, at the same
    effective rate."""
    table = study(bowl(0.5)).rates
    assert rows(table, "near") == [(2,)] * 3
    assert (
        list(table["effective_rate_low"])
        == pytest.approx([0.5, 1, 2])
        == list(table["effective_rate_high"])
    )
    assert list(table["learning_rate_high"]) == pytest.approx([0.125, 0.25, 0.5])
    wide = study(
        bowl(0.5, width=0.3)
    ).rates  # exp(0.3 log(2)^2) = 1.155; with the other momentum 1.27
    assert rows(wide, "near") == [(4,)] * 3
    assert list(wide["effective_rate_low"]) == pytest.approx([0.25, 0.5, 1])
    assert list(wide["effective_rate_high"]) == pytest.approx([1, 2, 4])


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0])
def test_the_power_of_the_rate_is_found_again(power):
    (curve,) = study(bowl(power)).rate_curves
    assert curve.law.exponent == pytest.approx(power) and curve.law.at(64) == pytest.approx(
        curve.best(64)
    )
    assert curve.law.name == "learning_rate / (1 - momentum)"


def test_the_price_of_the_right_rule_is_1_and_of_the_wrong_one_known():
    """At B = 64 linear scaling has 4 times the best rate: exp(0.5 log(4)^2) = 2.61 times the
    steps."""
    table = study(bowl(0.5)).prices
    assert rows(
        table, "batch_size", "price", "near", "verdict", rate="effective_rate", rule="square_root"
    ) == [
        (16, 1.0, 2, "measured"),
        (64, 1.0, 2, "measured"),
    ]
    (at_16, at_64) = rows(table, "price", rate="effective_rate", rule="linear")
    assert at_16[0] == pytest.approx(math.exp(0.5 * math.log(2) ** 2), rel=0.005)
    assert at_64[0] == pytest.approx(math.exp(0.5 * math.log(4) ** 2), rel=0.005)
    for row in records(table):
        assert row["price_low"] <= row["price"] <= row["price_high"]
    reversed_rule = study(
        bowl(1.0)
    ).prices  # where linear scaling is right, the square root is too low
    assert rows(reversed_rule, "price", rate="effective_rate", rule="linear") == [(1.0,)] * 2
    costs = rows(reversed_rule, "price", rate="effective_rate", rule="square_root")
    assert [c for (c,) in costs] == pytest.approx([1.27, 2.61], rel=0.01)


def test_the_plain_rate_is_scaled_with_momentum_tuned_anew():
    """eta = 0.05 sqrt(B / 4); the second momentum reaches the best effective rate at another
    eta."""
    table = study(bowl(0.5)).prices
    assert rows(table, "price", rate="learning_rate", rule="square_root") == [(1.0,)] * 2
    (rate,) = rows(table, "rule_rate", rate="learning_rate", rule="linear", batch_size=64)
    assert rate[0] == pytest.approx(0.8)
    # eta = 0.8 has effective rates 8 at m = 0.9 and, within the window, 4 (eta 1.0) and 2 (0.5) at
    # m = 0.75: 4 is best
    (price,) = rows(table, "steps", rate="learning_rate", rule="linear", batch_size=64)
    assert price[0] == round(162.5 * 1.1 * math.exp(0.5 * math.log(2) ** 2))


def test_no_trial_near_is_not_measured():
    results = bowl(0.5)
    results[Cell(64)] = [r for r in results[Cell(64)] if r.trial.params["model.momentum"] == 0.9][
        ::2
    ]  # 2^-4, 2^-2, ..
    table = study(results, trials=24).prices
    assert rows(table, "price", "near", "verdict", rate="effective_rate", batch_size=64) == [
        (None, 0, "no trial near"),  # 8
        (None, 0, "no trial near"),  # 2
    ]
    narrow = {**SPACE, "model.learning_rate": Range(1e-3, 0.02, "log")}
    record = dataclasses.replace(study(results, trials=24).record, space=narrow)
    table = Analysis(record).prices
    assert rows(table, "verdict", rate="effective_rate", batch_size=64) == [
        ("outside the search space",),  # 8 is above 0.02 / 0.01 and the window
        ("no trial near",),
    ]
    notes = FIGURE.notes(study(results, trials=24))
    assert numbers_in(notes[0])[:2] == [4, 8]


def two(*at_rule, slack=None, interval=1):
    """B = 4 with its best effective rate 0.5, and at B = 16 the best at 1 beside trials at the
    linear rule's 2."""
    best = {4: trial(4, 0, 0.5, 0.9, 400), 16: trial(16, 0, 1.0, 0.9, 100)}
    cells = {Cell(4): [best[4]], Cell(16): [best[16], *at_rule]}
    (row,) = (
        r
        for r in records(
            study(cells, trials=1, race_factor=slack, goal=Goal(0.1, interval, 1000)).prices
        )
        if (r["rate"], r["rule"]) == ("effective_rate", "linear")
    )
    return row


def ran(point, steps_run, status):
    curve = {"step": [steps_run], "val_error": [0.5], "train_loss": [1.0]}
    return trial(16, point, 2.0, 0.9, None, status, curve=curve)


def test_what_trials_that_miss_the_goal_say_of_the_price():
    row = two(ran(1, 1000, "incomplete"))
    assert (row["price"], row["verdict"], row["near"], row["complete"]) == (10.0, "at least", 1, 0)
    row = two(ran(1, 200, "outraced"), slack=2.0)
    assert (row["price"], row["verdict"]) == (2.0, "at least")
    row = two(ran(1, 10, "infeasible"))
    assert (row["price"], row["verdict"]) == (None, "all near diverged")
    row = two(ran(1, 10, "infeasible"), trial(16, 2, 2.1, 0.9, 150), ran(3, 1000, "incomplete"))
    assert (row["price"], row["verdict"], row["near"], row["complete"]) == (1.5, "measured", 3, 1)
    row = two(ran(1, 120, "stopped"), trial(16, 2, 2.1, 0.9, 150))
    assert (row["price"], row["verdict"]) == (1.5, "at most")


def test_k_star_at_the_first_check_bounds_the_price_and_begins_no_rule():
    row = two(trial(16, 1, 2.0, 0.9, 200), interval=100)
    assert (row["price"], row["verdict"]) == (2.0, "at least")
    row = two(ran(1, 120, "stopped"), trial(16, 2, 2.1, 0.9, 200), interval=100)
    assert (row["price"], row["steps"], row["verdict"]) == (None, 200, "both K are upper bounds")
    cells = {Cell(4): [trial(4, 0, 0.5, 0.9, 100)], Cell(16): [trial(16, 0, 1.0, 0.9, 200)]}
    cells[Cell(64)] = [trial(64, 0, 1.0, 0.9, 200)]
    table = study(cells, goal=Goal(0.1, 100, 1000)).rates
    assert rows(table, "floor", "scaled_from") == [(1, 16), (0, 16), (0, 16)]
    assert list(table["linear"]) == pytest.approx([0.25, 1, 4])


def test_rules_that_begin_on_the_end_of_the_range_are_told():
    record = study(bowl(0.5)).record
    assert FIGURE.notes(Analysis(record)) == []
    edge = dataclasses.replace(
        record, space={**SPACE, "model.learning_rate": Range(0.05, 10, "log")}
    )
    (note,) = FIGURE.notes(Analysis(edge))
    assert "S = 0 " in note


def test_a_window_of_another_width(monkeypatch):
    analysis = study(bowl(0.5))
    monkeypatch.setattr("lit_dps.analysis.rate_rules.WINDOW", 2.0)
    wide = price_rows(analysis.record, analysis.rate_curves)
    (price,) = rows(wide, "price", rate="effective_rate", rule="linear", batch_size=16)
    assert price == (1.0,)  # rates of 1 to 4: the best among them


@pytest.mark.parametrize(
    ("optimizer", "effective"),
    [
        ("sgd", 0.05),
        ("adam", 0.05),
        ("my_lion.LION", 0.05),
        ("my_muon.Muon", 0.05),
        ("nesterov", 0.5),
        ("my.RMSprop", 0.5),  # its momentum sums updates
        ("my.Rule", 0.5),
        (None, 0.5),
    ],
)
def test_what_the_update_rule_does_with_momentum(optimizer, effective):
    analysis = study(bowl(0.5), config={"model": {"init_args": {"optimizer": optimizer}}})
    (curve,) = analysis.rate_curves
    assert curve.best(4) == pytest.approx(effective)
    assert (len(set(analysis.prices["rate"])) == 2) == (effective == 0.5)
    notes = FIGURE.notes(analysis)
    averages = optimizer in ("adam", "my_lion.LION", "my_muon.Muon")
    assert any("Adam" in note for note in notes) == averages
    assert any("heavy-ball" in note for note in notes) == (optimizer in ("my.Rule", None))


def test_a_fixed_momentum_counts_and_a_rate_that_is_not_searched_has_no_figure(tmp_path):
    fixed = {"model": {"init_args": {"optimizer": "momentum", "momentum": 0.75}}}
    space = {"model.learning_rate": SPACE["model.learning_rate"]}
    cells = {Cell(b): [result(Cell(b), 0, 90, params={"model.learning_rate": 0.1})] for b in (4, 8)}
    analysis = study(cells, config=fixed, space=space)
    assert list(analysis.rates["effective_rate"]) == pytest.approx([0.4, 0.4])
    assert set(analysis.prices["rate"]) == {"effective_rate"}
    none = study(
        {Cell(4): [result(Cell(4), 0, 90, params={"model.width": 4})]},
        space={"model.width": Range(1, 9)},
    )
    assert write_figures([FIGURE], [none], tmp_path) == ([], [])
    (note,) = write_figures([FIGURE], [none], tmp_path, ["rates"])[1]
    assert "rates" in note
    assert len(none.rates) == len(none.prices) == 0


def test_the_optimizer_as_an_axis_is_that_of_each_series():
    def cell(b, rule):
        return Cell(b, 0.0, (("model.optimizer", rule),))

    params = {"model.learning_rate": 0.1, "model.momentum": 0.9}
    cells = {
        cell(b, rule): [result(cell(b, rule), 0, 90, params=params)]
        for b in (4, 8)
        for rule in ("sgd", "nesterov")
    }
    analysis = study(
        {}, batch_sizes=[4, 8], sparsities=[0.0], axes={"model.optimizer": ["sgd", "nesterov"]}
    )
    analysis.record.results.update(cells)
    curves = Analysis(analysis.record).rate_curves
    found = {dict(c.series.axes)["model.optimizer"]: c.best(4) for c in curves}
    assert found == {"sgd": pytest.approx(0.1), "nesterov": pytest.approx(1.0)}
