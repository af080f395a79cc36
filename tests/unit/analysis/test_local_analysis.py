"""K* against the local steps of a round: communications, how far it is flat, its table, its section
and figure."""

from __future__ import annotations

import dataclasses
import math

import pytest

from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.local_sgd import local_rows
from lit_dps.core.goal import Goal
from lit_dps.core.local_sgd import LocalSGDSchedule
from lit_dps.core.trial import Cell
from lit_dps.report.figures import FIGURES, drawn
from lit_dps.report.publish import write_all
from lit_dps.report.text import render
from tests.support.fake_study import analysis_of, result
from tests.support.texts import numbers_in

pytestmark = pytest.mark.pictures

KEY = "local.steps"
FIGURE = next(figure for figure in FIGURES if figure.NAME == "local")
LOCAL = {"workers": 4, "steps": 1, "start": 0, "outer_learning_rate": 1.0, "outer_momentum": 0.0}
LENGTHS = (1, 4, 16, 64)


def cell(batch_size: int, **local) -> Cell:
    return Cell(
        batch_size, 0.0, tuple((f"local.{key}", value) for key, value in sorted(local.items()))
    )


def study(
    steps: dict[int, dict[int, int | None]], start: int = 0, lengths=LENGTHS, interval: int = 4
):
    """A study of a trial a cell; `steps` by batch size, then by H."""
    cells = {
        cell(b, steps=h): [result(cell(b, steps=h), 0, k)]
        for b, found in steps.items()
        for h, k in found.items()
    }
    config = {"local": {**LOCAL, "start": start}}
    goal = Goal(0.1, check_interval=interval, max_steps=4000)
    return analysis_of(cells, space={}, goal=goal, axes={KEY: list(lengths)}, config=config)


FLAT_THEN_UP = {16: {1: 400, 4: 404, 16: 440, 64: 1280}, 256: {1: 40, 4: 40, 16: 64, 64: None}}


@pytest.mark.parametrize("start", [0, 24])
def test_communications_are_those_of_the_rule(start):
    table = study(FLAT_THEN_UP, start).table
    for row in table.to_dict("records"):
        if row["batch_size"] == 256 and row[KEY] == 64:
            continue
        assert row["communications"] == LocalSGDSchedule(4, row[KEY], start).communications(
            row["k_star"]
        )
    if start:
        first = table[(table["batch_size"] == 16) & (table[KEY] == 4)]["communications"].item()
        assert first == 24 + (404 - 24) // 4


def test_a_table_without_local_sgd_has_no_such_column():
    plain = {Cell(16): [result(Cell(16), 0, 40)]}
    assert "communications" not in analysis_of(plain, space={}, goal=Goal(0.1, 4, 400)).table
    assert "communications" not in render(analysis_of(plain, space={}, goal=Goal(0.1, 4, 400)))


def test_one_worker_beside_several_talks_to_nobody():
    cells = {cell(16, workers=n): [result(cell(16, workers=n), 0, 40)] for n in (1, 4)}
    config = {"local": {**LOCAL, "steps": 8}}
    found = analysis_of(
        cells, space={}, goal=Goal(0.1, 4, 400), axes={"local.workers": [1, 4]}, config=config
    )
    assert (
        found.table["communications"].isna().tolist() == [True, False]
        and found.table["communications"][1] == 5
    )
    assert found.local_curves == []


def test_how_far_k_star_is_flat():
    at_16, at_256 = study(FLAT_THEN_UP).local_curves
    assert [at_16.flat_to, at_256.flat_to] == [16, 4]
    assert at_16.points[-1] == (64, 1280, 20, False) and at_256.missed == (64,)
    (level,) = study({16: dict.fromkeys(LENGTHS, 40)}).local_curves
    assert level.flat_to == 64
    (unknown,) = study({16: {1: None, 4: 40, 16: 40, 64: 40}}).local_curves
    assert unknown.flat_to is None
    (chance,) = study({16: {1: 8, 4: 12, 16: 12, 64: 16}}).local_curves
    assert chance.flat_to == 16  # a check later is within the grid of checks


def test_an_unfinished_cell_bounds_how_far_k_star_is_flat():
    """The cell of H = 16 has no finished trial, or only one that failed or that was stopped."""
    cells = {}
    for h, k in {1: 100, 4: 105, 64: 100}.items():
        cells[cell(16, steps=h)] = [result(cell(16, steps=h), 0, k)]
    pending = {**cells, cell(16, steps=16): []}
    failed = {**cells, cell(16, steps=16): [result(cell(16, steps=16), 0, None, "failed")]}
    stopped = {**cells, cell(16, steps=16): [result(cell(16, steps=16), 0, None, "stopped")]}
    goal = Goal(0.1, check_interval=4, max_steps=4000)
    for each in (pending, failed, stopped):
        found = analysis_of(
            each, space={}, goal=goal, axes={KEY: list(LENGTHS)}, config={"local": LOCAL}, trials=1
        )
        (curve,) = found.local_curves
        assert (curve.missed, curve.unfinished, curve.flat_to) == ((), (16,), 4)
        assert curve.undecided_after_flat == 16
        assert "at least up to H = 4; H = 16 is unfinished" in curve.describe()
    missing = study({16: {1: 100, 4: 105, 16: None, 64: 100}})
    record = dataclasses.replace(
        missing.record, undetermined_points={cell(16, steps=16): {0: 4000}}
    )
    (undetermined,) = Analysis(record).local_curves
    assert (undetermined.missed, undetermined.unfinished) == ((), (16,))
    (missed,) = missing.local_curves
    assert (missed.missed, missed.unfinished, missed.flat_to) == ((16,), (), 4)
    assert missed.undecided_after_flat is None


@pytest.mark.parametrize("steps, undecided", [([300], 16), ([300, 304], None), ([108], None)])
def test_an_upper_bound_of_k_star_does_not_show_that_k_star_rises(steps, undecided):
    """One of three trials at H = 16 is too few for K* there."""
    cells = {}
    for h in LENGTHS:
        costs = steps if h == 16 else [100, 104, 108]
        cells[cell(16, steps=h)] = [result(cell(16, steps=h), i, k) for i, k in enumerate(costs)]
    goal = Goal(0.1, check_interval=4, max_steps=4000)
    axes = {KEY: list(LENGTHS)}
    found = analysis_of(cells, space={}, goal=goal, axes=axes, config={"local": LOCAL}, trials=3)
    (curve,) = found.local_curves
    assert curve.flat_to == (64 if steps == [108] else 4)
    assert curve.undecided_after_flat == undecided
    assert ("at least up to H = 4" in curve.describe()) == (undecided is not None)


def test_the_first_h_is_not_compared_with_itself():
    (rising,) = study({16: {1: 4, 4: 40, 16: 400, 64: 4000}}).local_curves
    assert rising.describe().count("H = 1 (K*") == 1


def test_the_report_has_the_curves_of_local_steps(golden):
    found = study(FLAT_THEN_UP)
    text = render(found)
    lines = [line for line in text.splitlines() if " H = " in line]
    golden.check("analysis/local.txt", "\n".join(lines) + "\n")
    assert [numbers_in(line)[-7:-1] for line in lines][0] == [16, 20, 64, 1280, 400, 1]
    assert len(lines) == 2
    head = next(
        line.split("  ") for line in text.splitlines() if "communications" in line and "K*" in line
    )
    assert "communications" in [word.strip() for word in head]


def test_what_is_flat_from_an_upper_bound_on_is_not_known():
    (floored,) = study({16: {1: 4, 4: 4, 16: 4, 64: 40}}).local_curves
    assert floored.flat_to is None
    assert numbers_in(floored.describe())[-6:] == [0, 16, 4, 4, 1, 4]
    assert floored.describe().count("<=") == 4
    (later,) = study({16: {1: 8, 4: 4, 16: 4, 64: 40}}).local_curves
    assert later.flat_to == 16, "what comes after may be lower"
    assert numbers_in(later.describe())[-6:] == [0, 16, 4, 8, 1, 8]
    assert later.describe().count("<=") == 2


def test_bounds_are_told_as_such():
    text = render(study({16: {1: 4, 4: 4, 16: 8, 64: 8}}))
    assert "<= 4" in text and "<= 1" in text


@pytest.mark.pictures("local")
def test_its_figure_and_file(tmp_path):
    found = study(FLAT_THEN_UP)
    left, right = drawn(FIGURE, found).axes
    assert [list(line.get_xdata()) for line in left.lines if len(line.get_xdata())] == [
        [1, 4, 16, 64],
        [1, 4, 16],
    ]
    curves = [
        (list(line.get_xdata()), list(line.get_ydata()))
        for line in right.lines
        if len(line.get_xdata())
    ]
    assert curves == [([400, 101, 27, 20], [400, 404, 440, 1280]), ([40, 10, 4], [40, 40, 64])]
    assert [text.get_text() for text in left.texts] == ["B = 256", "B = 16"]
    (note,) = FIGURE.notes(found)
    assert {"B=256", "S=0", "H=64"} <= set(note.replace(",", " ").replace(".", " ").split())
    files, _ = write_all(found, tmp_path)
    assert {"local.csv", "local.png", "local.pdf"} <= {file.name for file in files}
    assert "K*" in FIGURE.missing(study({16: {1: None, 4: None}}))


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ({1: 400, 4: 440, 16: 800, 64: None}, [1.0, 1.1, 2.0]),
        # K* at H = 1 is at the first check, so the true ratios are larger than these numbers.
        ({1: 4, 4: 8, 16: 40, 64: 80}, [None] * 4),
        ({1: None, 4: 40, 16: 80, 64: 160}, [None] * 3),
    ],
)
def test_k_star_is_divided_only_by_a_known_k_star_of_the_least_h(steps, expected):
    ratios = local_rows(study({16: steps}).local_curves)["times_k_star"]
    assert [None if math.isnan(float(x or math.nan)) else x for x in ratios] == expected
