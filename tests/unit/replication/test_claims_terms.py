"""The paper's claims on the theory's terms, judged on studies for which the verdict is known."""

import dataclasses
import math
import re

import pytest

from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.term_comparisons import lipschitz_at_the_same_steps
from lit_dps.core.repeats import RepeatPlan
from lit_dps.core.trial import Cell
from lit_dps.replication.rules import Verdict
from lit_dps.replication.terms import c1_over_theory, term_ratio
from tests.support.claims import CLAIMS, judged
from tests.support.fake_study import analysis_of, result, theory_terms

SEEN, NOT_SEEN, UNDECIDABLE = Verdict


def theory(
    points=8,
    spread=0.0,
    c1=1.67,
    sparsities=(0.0, 0.9),
    sizes=(4, 64),
    measured=True,
    config=None,
    **ratios,
):
    """A study whose terms have the given ratios on average, by e^spread more or less at a point."""
    cells = {}
    for b in sizes:
        for s in sparsities:
            cells[Cell(b, s)] = []
            for point in range(points):
                off = math.exp(spread if point % 2 else -spread)
                factor = {key: x * off for key, x in ratios.items()} if s == 0.9 else {}
                terms = {
                    "loss": factor.get("delta", 1.0),
                    "beta": factor.get("beta", 1.0),
                    "lipschitz": [0.57 * factor.get("lipschitz", 1.0)] * 2,
                }
                steps = round((160000 * (c1 if s == 0.9 else 1)) / b + 1000)
                kept = theory_terms(steps, **terms) if measured else {}
                cells[Cell(b, s)].append(result(Cell(b, s), point, steps, **kept))
    return analysis_of(cells, space={}, config=config or {})


PAPER = {"delta": 1.0, "beta": 0.54, "lipschitz": 3.09}
THREE = (4, 16, 64)


def test_a_size_that_the_paper_does_not_have_is_told():
    assert judged("variance-falls", theory(beta=0.3)).paper_is_outside
    assert not judged("variance-falls", theory(beta=0.54)).paper_is_outside


def test_what_is_before_the_first_step_needs_no_measurement_of_l():
    study = theory(**PAPER)
    kept = {
        cell: [
            dataclasses.replace(each, readings={"lipschitz": {"step": [], "lipschitz": []}})
            for each in results
        ]
        for cell, results in study.record.results.items()
    }
    study = Analysis(dataclasses.replace(study.record, results=kept))
    beta, delta = judged("variance-falls", study), judged("loss-stays", study)
    assert (beta.verdict, delta.verdict) == (SEEN, SEEN)
    assert term_ratio(study, "beta")[""].number.value == pytest.approx(0.54)
    assert term_ratio(study, "delta")[""].number.value == pytest.approx(1)
    assert (
        judged("lipschitz-rises", study) is None
        and judged("theory-predicts-c1", study, study) is None
    )


@pytest.mark.parametrize(
    ("claim", "study", "verdict"),
    [
        ("lipschitz-rises", theory(**PAPER), SEEN),
        ("lipschitz-rises", theory(lipschitz=1.05), NOT_SEEN),
        ("lipschitz-rises", theory(lipschitz=1.3, spread=1.0), UNDECIDABLE),
        ("lipschitz-rises", theory(**PAPER, points=3), UNDECIDABLE),
        ("variance-falls", theory(**PAPER), SEEN),
        ("variance-falls", theory(beta=0.95), NOT_SEEN),
        ("variance-falls", theory(beta=0.9, spread=0.5), UNDECIDABLE),
        ("loss-stays", theory(**PAPER), SEEN),
        ("loss-stays", theory(delta=1.2), NOT_SEEN),
        ("loss-stays", theory(delta=1.1, spread=0.2), UNDECIDABLE),
        ("theory-predicts-c1", theory(**PAPER, sizes=THREE), SEEN),
        ("theory-predicts-c1", theory(**PAPER, sizes=THREE, c1=4.0), NOT_SEEN),
        (
            "theory-predicts-c1",
            theory(**PAPER, sizes=THREE, c1=1.67 * 1.4, spread=0.3),
            UNDECIDABLE,
        ),
        ("theory-predicts-c1", theory(**PAPER), UNDECIDABLE),  # two batch sizes have no law
    ],
)
def test_terms(claim, study, verdict):
    assert judged(claim, *[study] * CLAIMS[claim].studies).verdict is verdict


def test_terms_in_numbers():
    study = theory(**PAPER)
    measured = term_ratio(study, "lipschitz")[""]
    assert measured.number.value == pytest.approx(3.09)
    assert measured.number.interval == pytest.approx((3.09, 3.09))
    assert " 16 pairs" in measured.sentence
    same_steps, sizes = measured.notes
    assert f"x3.09 {[3.09, 3.09]}" in same_steps
    assert re.findall(r"[\d.]+", sizes) == ["0.570", "1.76", "0", "0.9", "2", "2"]
    config = {**study.record.config, "smoothness": {"interval": 100, "examples": 6000}}
    part = Analysis(dataclasses.replace(study.record, config=config))
    assert "6,000" in term_ratio(part, "lipschitz")[""].notes[1]
    assert term_ratio(study, "beta")[""].number.interval == pytest.approx((0.54, 0.54))
    whole = theory(**PAPER, sizes=THREE)
    measured = c1_over_theory(whole, whole)[""]
    assert measured.number.value == pytest.approx(1, abs=5e-3)
    assert measured.sentence.count(f"x1.67 {[1.67, 1.67]}") == 1
    assert "c1 x1.67" in measured.sentence
    (epsilon,) = measured.notes
    assert f"x1 {[1, 1]}" in epsilon and f"x1.67 {[1.67, 1.67]}" in epsilon


def test_a_law_that_misses_its_k_star_tells_no_c1():
    whole = theory(**PAPER, sizes=(4, 8, 16, 64))
    for factor, verdict in ((1.01, SEEN), (1.5, UNDECIDABLE)):
        off = {Cell(8, 0.9): factor, Cell(16, 0.9): 1 / factor}
        bent = {
            cell: [dataclasses.replace(r, steps=round(off.get(cell, 1) * r.steps)) for r in found]
            for cell, found in whole.record.results.items()
        }
        study = Analysis(dataclasses.replace(whole.record, results=bent))
        assert judged("theory-predicts-c1", study, study).verdict is verdict
        measured = c1_over_theory(study, study)[""]
        assert (measured.number is None) == (verdict is UNDECIDABLE)
        assert len(measured.notes) == (2 if verdict is UNDECIDABLE else 1)


def test_where_best_points_were_repeated_the_theory_is_held_against_the_medians():
    whole = theory(**PAPER, sizes=THREE)
    again = {}
    for cell, found in whole.record.results.items():
        again[cell] = [
            dataclasses.replace(
                found[0],
                steps=round((2 if cell.sparsity else 1) * found[0].steps),
                trial=dataclasses.replace(found[0].trial, repeat=i),
            )
            for i in range(1, 6)
        ]
    study = Analysis(dataclasses.replace(whole.record, repeats=again, plan=RepeatPlan(5, 1, None)))
    measured = c1_over_theory(study, study)[""]
    assert measured.uses_medians and "c1 is x3.34" in measured.sentence
    assert measured.number.value == pytest.approx(2, abs=5e-3)


def test_terms_and_laws_may_come_from_two_studies_of_one_workload():
    """Terms at one batch size alone, and the laws of a study that measured nothing."""
    measured, laws = theory(**PAPER, sizes=(64,)), theory(**PAPER, sizes=THREE, measured=False)
    whole = theory(**PAPER, sizes=THREE)
    said = judged("theory-predicts-c1", measured, laws)
    assert (said.verdict, said.measured) == (
        SEEN,
        judged("theory-predicts-c1", whole, whole).measured,
    )
    assert judged("theory-predicts-c1", measured, measured).verdict is UNDECIDABLE
    assert judged("theory-predicts-c1", laws, measured) is None
    other = theory(
        **PAPER, measured=False, config={"model": {"init_args": {"optimizer": "momentum"}}}
    )
    assert judged("theory-predicts-c1", measured, other) is None
    easier = dataclasses.replace(laws.record, goal=dataclasses.replace(laws.record.goal, value=0.5))
    assert judged("theory-predicts-c1", measured, Analysis(easier)) is None, (
        "terms are means up to another goal"
    )


def test_at_the_same_steps_a_longer_run_counts_as_far_as_the_shorter_one():
    # L falls as 1 / step at both sparsities; the sparse one is twice as large and measured for
    # longer.
    cells = {Cell(64, s): [] for s in (0.0, 0.9)}
    for (cell, found), lasts in zip(cells.items(), (2, 8), strict=True):
        for point in range(4):
            at = [100 * (i + 1) for i in range(lasts)]
            lipschitz = [(2 if cell.sparsity else 1) * 100 / step for step in at]
            found.append(
                result(cell, point, at[-1], **theory_terms(at[-1], lipschitz=lipschitz, at=at))
            )
    study = analysis_of(cells, space={})
    dense, sparse = study.record.series
    same = lipschitz_at_the_same_steps(study.record, dense, sparse)
    assert [point for point, _ in same] == [0, 1, 2, 3]
    assert [log for _, log in same] == pytest.approx([math.log(2)] * 4)
    of_runs = 2 * (sum(1 / i for i in range(1, 9)) / 8) / 0.75
    measured = term_ratio(study, "lipschitz")[""]
    assert measured.number.value == pytest.approx(of_runs)
    assert measured.number.interval == pytest.approx((of_runs, of_runs))
    same_steps, sizes = measured.notes
    assert f"x2 {[2, 2]}" in same_steps
    values = ["0.750", f"{0.75 * of_runs:.3f}", "0", "0.9", "2", "8"]
    assert re.findall(r"[\d.]+", sizes) == values


def test_intervals_are_students_over_points():
    # Two batch sizes of each of four points, alike: as certain as four pairs, not as eight.
    cells = {Cell(b, s): [] for b in (4, 64) for s in (0.0, 0.9)}
    for point, ratio in enumerate((1.0, 2.0, 4.0, 8.0)):
        for cell, found in cells.items():
            lipschitz = [ratio if cell.sparsity else 1.0]
            found.append(result(cell, point, 160, **theory_terms(160, lipschitz=lipschitz)))
    number = term_ratio(analysis_of(cells, space={}), "lipschitz")[""].number
    # log2 of the points: mean 1.5, error sqrt(5 / 3) / 2 = 0.6455; Student's t of 3 degrees of
    # freedom at 97.5 %: 3.182
    low, high = 2 ** (1.5 - 3.182 * 0.6455), 2 ** (1.5 + 3.182 * 0.6455)
    assert number.value == pytest.approx(2**1.5)
    assert number.interval == pytest.approx((low, high), rel=0.03)


TERM_CLAIMS = ["lipschitz-rises", "variance-falls", "loss-stays", "theory-predicts-c1"]


@pytest.mark.parametrize("claim", TERM_CLAIMS)
def test_the_theory_needs_measurements_at_both_sparsities(claim):
    dense = theory(**PAPER, sparsities=(0.0,))
    cells = {
        Cell(b, s): [result(Cell(b, s), i, 160) for i in range(4)]
        for b in (4, 64)
        for s in (0.0, 0.9)
    }
    for study in (dense, analysis_of(cells, space={})):
        assert judged(claim, *[study] * CLAIMS[claim].studies) is None
