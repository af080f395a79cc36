"""The terms of the theory and their ratios, against values worked out by hand."""

import dataclasses
import math

import optuna
import pytest

from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.other_goals import at_goal
from lit_dps.analysis.tables import records
from lit_dps.analysis.term_comparisons import paired_terms
from lit_dps.analysis.theory import Terms, terms_of
from lit_dps.core.trial import Cell, Series
from lit_dps.report.screen import screen
from lit_dps.report.text import render, theory_text
from lit_dps.storage.read import read_study
from tests.support.fake_study import result, theory_terms, write_study
from tests.support.texts import in_one_line


def record_of(cells):
    storage = optuna.storages.InMemoryStorage()
    write_study(storage, cells)
    return read_study(storage, "fake")


def one(cell=Cell(8, 0.0), point=0, steps=200, status="complete", **terms):  # noqa: B008
    return result(cell, point, steps, status, **theory_terms(**{"steps": steps or 400, **terms}))


def test_the_law_at_a_constant_rate():
    # Delta = 2 (2.5 - 0.5) = 4, L = 3, beta = 10, eta = 0.05, 200 steps. A gradient is read before
    # step 1, 51 and 151: epsilon = (1 x 20.1 + 50 x 0.2 + 100 x 0.303) / 151 = 0.4
    squared = {"first": 20.1, "squared": [0.2, 0.303], "at": [51, 151]}
    terms = terms_of(one(loss=2.5, floor=0.5, lipschitz=[2, 4], beta=10, rate=0.05, **squared))
    assert vars(terms) == pytest.approx(
        {
            "delta": 4,
            "lipschitz": 3,
            "beta": 10,
            "epsilon": 0.4,
            "rate": 0.05,
            "rate_squares": 0.5,
            "steps": 200,
        }
    )
    assert terms.c1 == pytest.approx(4 * 3 * 10 / 0.16)  # 750
    assert terms.c2 == pytest.approx(4 / (0.05 * 0.4))  # 200
    assert not terms.has_varying_rates
    assert terms.law.steps(15) == pytest.approx(750 / 15 + 200)
    # What both forms share: the bound is met with equality at K* = A / rate, up to the first order
    # in 1 / B.
    assert terms.delta / (terms.rate * terms.c2) == pytest.approx(terms.epsilon)


def test_the_law_at_rates_that_fall():
    # Rates 0.3, 0.2, 0.1: mean 0.2, H = 0.14 > 3 x 0.04 = 0.12
    terms = Terms(delta=4, lipschitz=3, beta=10, epsilon=0.4, rate=0.2, rate_squares=0.14, steps=3)
    assert terms.has_varying_rates
    assert terms.law.c1 == pytest.approx(3 * 10 * 0.14 / (0.2 * 0.4))  # 52.5
    assert (terms.law.c1, terms.law.c2) == pytest.approx((52.5, 4 / (0.2 * 0.4)))
    # (Delta + L beta H / B) / A = epsilon at K = c1 / B + c2, as the bound has it
    k = terms.law.steps(7)
    assert (4 + 3 * 10 * 0.14 / 7) / (k * 0.2) == pytest.approx(0.4)
    # The same run at the constant rate 0.2: the other form holds where H is not known before K.
    assert dataclasses.replace(terms, rate_squares=0.12).law.c1 == pytest.approx(4 * 3 * 10 / 0.16)


def test_measurements_that_are_not_finite_are_left_out():
    terms = terms_of(
        one(lipschitz=[math.nan, 5, math.inf], squared=[math.nan, 1, 3], first=5, at=[11, 21, 31])
    )
    assert (terms.lipschitz, terms.epsilon) == (5, pytest.approx((1 * 5 + 20 * 1 + 10 * 3) / 31))


@pytest.mark.parametrize(
    "terms",
    [
        {"lipschitz": []},
        {"lipschitz": [math.nan]},
        {"beta": 0.0},
        {"loss": 0.0},
        {"loss": math.inf},
        {"first": math.nan, "squared": [math.nan, math.nan]},
    ],
)
def test_no_terms_without_what_they_need(terms):
    assert terms_of(one(**terms)) is None


def test_no_terms_without_measurements():
    assert terms_of(result(Cell(8, 0.0), 0, 200)) is None


def test_a_run_cut_at_a_higher_goal_predicts_only_where_its_rates_are_constant():
    curve = {"step": [100, 200], "val_error": [0.2, 0.1], "train_loss": [1.0, 1.0]}
    kw = theory_terms(
        steps=200, rate=0.5, lipschitz=[1, 3], at=[50, 150], squared=[1, 1], first=1, loss=2, beta=6
    )
    constant = result(Cell(8, 0.0), 0, 200, curve=curve, **kw)
    squares = 1.1 * kw["flags"]["theory/rate_square_sum"]
    kw["flags"] = {**kw["flags"], "theory/rate_square_sum": squares}
    falling = result(Cell(32, 0.0), 0, 200, curve=curve, **kw)
    own = record_of({Cell(8, 0.0): [constant], Cell(32, 0.0): [falling]})
    cut = at_goal(own, 0.2)
    whole, short = ([row for row in records(Analysis(record).theory)] for record in (own, cut))
    assert [(row["k_star"], row["lipschitz"], row["rate"]) for row in whole] == [(200, 2, 0.5)] * 2
    assert [(row["k_star"], row["lipschitz"], row["rate"]) for row in short] == [
        (100, 1, 0.5),
        (100, 1, None),
    ]
    # Delta = 4, beta = 6, epsilon = 1: constant c1 = 4 L 6; falling c1 = L 6 H / etabar = 2 x 6 x
    # 55 / 0.5
    assert [row["predicted_c1"] for row in whole] == pytest.approx([48, 1320])
    assert [row["predicted_c1"] for row in short] == [24, None]
    assert [row["predicted_c2"] for row in short] == [8, None]


def test_rows_of_the_k_star_trials():
    dense, sparse = Cell(8, 0.0), Cell(8, 0.9)
    cells = {
        dense: [
            one(dense, 0, 320),
            one(dense, 1, 160, lipschitz=[2], beta=5, first=1, squared=[1], loss=1, rate=0.1),
        ],
        Cell(16, 0.0): [one(Cell(16, 0.0), 0, 96, lipschitz=[])],
        Cell(32, 0.0): [one(Cell(32, 0.0), 0, 64, lipschitz=[])],
        sparse: [one(sparse, 0, None)],
        Cell(16, 0.9): [],
        Cell(32, 0.9): [],
    }
    record = record_of(cells)
    rows = records(Analysis(record).theory)
    assert [(row["batch_size"], row["sparsity"]) for row in rows] == [
        (b, s) for s in (0, 0.9) for b in (8, 16, 32)
    ]
    # Delta = 2, L = 2, beta = 5, epsilon = 1, rate 0.1: c1 = 20, c2 = 20, K* = 20 / 8 + 20
    assert (rows[0]["point"], rows[0]["k_star"], rows[0]["delta"], rows[0]["rate"]) == (
        1,
        160,
        2,
        0.1,
    )
    predicted = rows[0]["predicted_c1"], rows[0]["predicted_c2"], rows[0]["predicted_k_star"]
    assert predicted == pytest.approx((20, 20, 22.5))
    # The law through (8, 160), (16, 96) and (32, 64): c1 = 96 / (1/8 - 1/32) = 1024, c2 = 32
    assert (rows[0]["c1"], rows[0]["c2"]) == pytest.approx((1024, 32), rel=1e-6)
    assert (rows[2]["k_star"], rows[2]["predicted_c1"], rows[2]["lipschitz"]) == (64, None, None)
    assert (rows[3]["k_star"], rows[3]["point"], rows[3]["c1"], rows[3]["delta"]) == (
        None,
        None,
        None,
        None,
    )


def paper():
    """A study with the paper's ratios on average: Delta x1.00, beta x0.54, L x3.09; epsilon x2.
    Nothing at B = 16."""
    cells = {Cell(b, s): [] for b in (8, 16, 32) for s in (0.0, 0.9)}
    for s, k in ((0.0, 480), (0.9, 1493)):
        cell = Cell(16, s)
        cells[cell] = [result(cell, 0, k), result(cell, 1, None), result(cell, 2, None)]
    for b, steps in ((8, (800, 1600)), (32, (320, 1440))):
        cells[Cell(b, 0.0)] = [
            one(Cell(b, 0.0), i, steps[0], beta=10, lipschitz=[0.5, 0.5]) for i in range(3)
        ]
        off = 1.5 if b == 8 else 1 / 1.5  # cancels in the geometric mean over both batch sizes
        terms = {"beta": 5.4 * off, "lipschitz": [1.545, 1.545], "first": 2, "squared": [2, 2]}
        sparse = Cell(b, 0.9)
        cells[sparse] = [one(sparse, 0, steps[1], **terms), one(sparse, 1, None, **terms)]
        cells[sparse].append(one(sparse, 2, None, "infeasible", lipschitz=[1e9, 1e9]))
    return record_of(cells)


def test_ratios_are_geometric_means_over_pairs():
    record = paper()
    small, middle, large, every = rows = records(Analysis(record).term_ratios)
    assert [(row["batch_size"], row["pairs"]) for row in rows] == [
        (8, 2),
        (16, 0),
        (32, 2),
        (None, 4),
    ]
    assert {(row["sparsity"], row["base"]) for row in rows} == {(0.9, 0.0)}
    names = (
        "delta",
        "beta",
        "lipschitz",
        "epsilon",
        "predicted_c1",
        "predicted_c1_measured_epsilon",
    )
    assert [every[name] for name in names] == pytest.approx([1, 0.54, 3.09, 2, 1.6686, 1.6686 / 4])
    assert (small["beta"], large["beta"]) == pytest.approx((0.81, 0.36))
    assert (small["k_star"], middle["k_star"], large["k_star"]) == pytest.approx(
        (2, 1493 / 480, 4.5)
    )
    assert every["k_star"] == pytest.approx((2 * 1493 / 480 * 4.5) ** (1 / 3))
    assert (every["k_star_low"], every["k_star_high"]) == (2, 4.5)
    # Through (8, 800), (32, 320): c1 = 480 / (3/32) = 5120; sparse (8, 1600), (32, 1440): 160 /
    # (3/32) = 1706.7
    assert every["c1"] == small["c1"] == pytest.approx(1 / 3, rel=2e-3)
    assert [
        (pair.batch_size, pair.point) for pair in paired_terms(record, Series(0.0), Series(0.9))
    ] == [
        (8, 0),
        (8, 1),
        (32, 0),
        (32, 1),
    ]


def test_a_law_that_does_not_describe_k_has_no_fitted_constants():
    k_star = {4: 4000, 16: 1200, 64: 100, 256: 2600}
    analysis = Analysis(
        record_of({Cell(b, 0.0): [one(Cell(b, 0.0), 0, k_star[b])] for b in k_star})
    )
    (law,) = analysis.laws.values()
    assert law.fit is not None and not law.describes_k
    rows = records(analysis.theory)
    assert [(row["k_star"], row["c1"], row["c2"]) for row in rows] == [
        (k, None, None) for k in k_star.values()
    ]


def test_ratios_are_none_where_nothing_pairs():
    dense, sparse = Cell(8, 0.0), Cell(8, 0.5)
    cells = {
        dense: [one(dense, 0, 100), result(dense, 1, None, "infeasible")],
        sparse: [result(sparse, 0, None, "infeasible"), one(sparse, 1, 300)],
    }
    record = record_of(cells)
    rows = records(Analysis(record).term_ratios)
    assert len(rows) == 2
    for row in rows:
        assert (row["pairs"], row["delta"], row["predicted_c1"], row["c1"]) == (0, None, None, None)
        assert row["k_star"] == pytest.approx(3)


def test_the_report_has_a_section_between_the_law_and_the_notes_where_terms_are_measured():
    record = paper()
    text, section = render(Analysis(record)), theory_text(Analysis(record))
    head, after = text.split(section)
    assert "\nK* = " in head and "note: " not in head
    assert after.startswith("\nnote: ") or after == ""
    lines = section.splitlines()
    assert lines[0].startswith("theory (")
    shown = in_one_line(section)
    assert shown in in_one_line(screen(Analysis(record), ["theory"], width=200))
    assert shown not in in_one_line(screen(Analysis(record)))
    assert lines[1].split("  ")[-2:] == ["predicted K*", "K*".rjust(4)] or lines[1].endswith("K*")
    (ratios,) = [i for i, line in enumerate(lines) if line.startswith("ratios to S=0")]
    assert lines[ratios + 4].split() == [
        "all",
        "0.9",
        "4",
        "x1.00",
        "x0.540",
        "x3.09",
        "x2.00",
        "x1.67",
        "x0.417",
        "x0.333",
        "x3.04",
    ]


def test_nothing_measured_leaves_the_report_as_it_was():
    record = record_of(
        {Cell(8, 0.0): [result(Cell(8, 0.0), 0, 100)], Cell(8, 0.9): [result(Cell(8, 0.9), 0, 300)]}
    )
    assert theory_text(Analysis(record)) == ""
    assert "theory" not in render(Analysis(record))
