"""Steps against examples of constant and of growing batches, as drawn."""

from __future__ import annotations

from lit_dps.report.figures import ramps
from tests.unit.analysis.test_ramps import RAMP, STEPS, Cell, study


def test_each_k_star_is_a_point_of_steps_and_examples():
    found = study()
    rows = ramps.rows(found)
    points = {}
    for row in rows.itertuples():
        points[row.batch_size, row.constant] = (row.steps, row.examples)
    assert points == {
        (16, 1): (60, 960),
        (32, 1): (40, 1280),
        (64, 1): (30, 1920),
        (64, 0): (28, 992),
    }
    (ax,) = ramps.draw(rows, found).axes
    drawn = []
    for line in ax.lines:
        drawn += [tuple(map(float, point)) for point in line.get_xydata()]
    expected = [(examples, steps) for steps, examples in points.values()]
    assert sorted(drawn) == sorted(expected)
    assert ramps.missing(found) is None and ramps.by_default(found)


def test_a_study_of_one_kind_has_no_figure():
    assert "batch.schedule" in str(ramps.missing(study({Cell(64, 0.0, RAMP): 28})))
    bounds = study(STEPS | {Cell(64, 0.0, RAMP): 2})
    assert any("1 of 4" in note for note in ramps.notes(bounds))
