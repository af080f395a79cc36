"""The study that the benchmark of `analyze` makes, and how its parts are shown."""

from __future__ import annotations

from benchmarks import analyze
from benchmarks.numbers import Sample
from lit_dps.analysis.analysis import Analysis
from lit_dps.storage.read import read_study


def test_the_made_up_study_has_curves_and_a_k_star_in_each_cell(tmp_path):
    analyze.make_study(str(tmp_path), [16, 256], [0.0, 0.9], [1e-4])
    record = read_study(f"sqlite:///{tmp_path}/study.db", analyze.NAME)
    found = {(c.cell.batch_size, c.cell.sparsity): c.k_star for c in Analysis(record).cells}
    assert record.axes == {analyze.AXIS: (1e-4,)}
    assert all(len(results) == analyze.TRIALS for results in record.results.values())
    assert found.keys() == {(16, 0.0), (256, 0.0), (16, 0.9), (256, 0.9)}
    assert found[16, 0.0] > found[256, 0.0] > 60 and found[16, 0.9] > found[256, 0.9] > 168


def test_each_part_is_shown_over_plain_optuna():
    rows = (analyze.Row(analyze.BASELINE, Sample((2.0,)), Sample((1.0,))),)
    rows += (analyze.Row("reading", Sample((1.0,)), Sample((0.5,))),)
    shown = analyze.show(analyze.Analyzed(4, 40, rows)).splitlines()
    assert shown[0].endswith("Baseline: Optuna reads the same trials.")
    assert shown[-1] == "| reading | 1.00 s | x0.500 |"
