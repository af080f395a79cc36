"""K* at the first check is only an upper bound: told as one, and left out of the law, of ratios and
of claims."""

import dataclasses

import optuna
import pytest

from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.law import fit_law
from lit_dps.analysis.observations import AT_MOST, Observation
from lit_dps.analysis.other_goals import at_goal
from lit_dps.analysis.summary import summarize
from lit_dps.analysis.tables import records
from lit_dps.core.search_space import Range
from lit_dps.core.trial import Cell, Series
from lit_dps.replication.rules import Verdict
from lit_dps.report.text import render, theory_text
from lit_dps.report.warnings import first_check_bounds, study_notes
from lit_dps.storage.read import read_study
from tests.support.claims import judged
from tests.support.fake_study import GOAL, result, theory_terms, write_study
from tests.support.texts import numbers_in


def study_of(steps, **kw):
    """A study by the steps of the trials of its cells, (batch size, sparsity) -> steps; checked
    every 16 steps."""
    results = {
        Cell(*cell): [result(Cell(*cell), i, k) for i, k in enumerate(found)]
        for cell, found in steps.items()
    }
    storage = optuna.storages.InMemoryStorage()
    write_study(storage, results, **{"space": {}, **kw})
    record = read_study(storage, "fake")
    return Analysis(record, replicates=200)


DENSE = {(8, 0.0): [800, 960], (64, 0.0): [112, 160], (512, 0.0): [16, 32]}


@pytest.mark.parametrize(("k_star", "bound"), [(16, True), (17, False), (32, False), (None, False)])
def test_only_the_first_check_is_a_bound(k_star, bound):
    runs = [result(Cell(8), 0, 16), result(Cell(8), 1, 32), result(Cell(8), 2, None)]
    assert GOAL.is_at_first_check(k_star, runs) is bound


def law(steps):
    """Return the law of K* by batch size, checked every 16 steps."""
    observations = []
    for b, k in steps.items():
        if k <= 16:
            observations.append(Observation(b, k, bound=AT_MOST))
        else:
            observations.append(Observation(b, k, 0.05, 16))
    return fit_law(observations)


def test_a_bound_that_the_law_keeps_stays_out_of_the_fit_and_among_the_k_star():
    steps = {8: 800, 16: 407, 64: 112}
    # 10 steps by the law of the others
    bounded, without = law(steps | {10**6: 16}), law(steps)
    assert bounded.k_star == steps | {10**6: 16}
    assert (bounded.upper_bounds, bounded.exact_k) == ({10**6}, steps)
    assert bounded.fit.c1 == pytest.approx(without.fit.c1)
    assert bounded.fit.c2 == pytest.approx(without.fit.c2)
    assert bounded.fit.c1 == pytest.approx(688 / (1 / 8 - 1 / 64), rel=0.05)
    assert bounded.range == without.range == (8, 64)
    assert without.upper_bounds == frozenset()


def test_a_bound_that_the_law_breaks_pulls_its_floor_down():
    steps = {8: 800, 16: 450, 64: 200}
    assert law(steps | {512: 16}).fit.c2 < 0.5 * law(steps).fit.c2


def test_too_few_others_give_no_law_and_the_verdict_says_why():
    few = law({8: 800, 64: 16, 512: 16})
    assert few.fit is None
    assert numbers_in(few.describe())[-2:] == [2, 3]


def test_the_table_the_note_and_the_rows():
    study = study_of(DENSE)
    assert [line.split() for line in render(study).splitlines()[3:6]] == [
        ["8", "0", "800", "2", "0", "0", "-"],
        ["64", "0", "112", "2", "0", "0", "-"],
        ["512", "0", "<=", "16", "2", "0", "0", "-"],
    ]
    (bound,) = first_check_bounds(study)
    assert bound == {"count": 1, "cells": 3, "places": "B = 512"}
    note = study_notes(study)[0]
    assert numbers_in(note) == [512, 1, 3]
    assert f"note: {note}\n" in render(study)
    rows = records(study.table)
    assert list(rows[0])[2:4] == ["k_star", "floor"]
    assert [(row["k_star"], row["floor"]) for row in rows] == [(800, 0), (112, 0), (16, 1)]
    assert [row["batch_sizes"] for row in records(study.law_table)] == [2]
    assert [cell.is_upper_bound for cell in summarize(study.record)] == [False, False, True]


def test_nothing_is_said_where_there_is_none():
    study = study_of(
        {cell: [k + 16 for k in found] for cell, found in DENSE.items()} | {(4096, 0.0): [None]}
    )
    assert [*first_check_bounds(study)] == []
    assert "<=" not in render(study)
    assert [row["floor"] for row in records(study.table)] == [0, 0, 0, 0]


def test_a_further_goal_has_its_own():
    curve = {"step": [16, 32, 48], "val_error": [0.3, 0.2, 0.1], "train_loss": [1.0] * 3}
    cells = {Cell(b, 0.0): [result(Cell(b, 0.0), 0, 48, curve=curve)] for b in (8, 16, 64)}
    storage = optuna.storages.InMemoryStorage()
    write_study(storage, cells, space={}, goals=[0.3, 0.2])
    record = read_study(storage, "fake")
    found = {error: Analysis(at_goal(record, error)).laws[Series(0.0)] for error in (0.3, 0.2)}
    assert (found[0.3].k_star, found[0.3].upper_bounds, found[0.3].fit) == (
        {8: 16, 16: 16, 64: 16},
        {8, 16, 64},
        None,
    )
    assert (found[0.2].k_star, found[0.2].upper_bounds) == ({8: 32, 16: 32, 64: 32}, set())
    assert found[0.2].fit is not None


SPARSE = {(8, 0.9): [1600, 3200], (64, 0.9): [448, 480], (512, 0.9): [64, 80]}


def test_ratios_are_of_resolved_k_star():
    study = study_of(
        DENSE | SPARSE | {(64, 0.5): [16, 32], (8, 0.5): [1200, 1200], (512, 0.5): [None, None]}
    )
    assert [(str(ratio.cell), ratio.value) for ratio in study.ratios] == [
        ("B=8 S=0.5", 1.5),
        ("B=8 S=0.9", 2),
        ("B=64 S=0.9", 4),
    ]
    assert list(map(str, study.ratio_bounds)) == ["B=64 S=0.5", "B=512 S=0.9"]


def test_the_theory_compares_resolved_k_star_and_tells_the_others_as_bounds():
    cells = {
        Cell(*cell): [result(Cell(*cell), i, k, **theory_terms(k)) for i, k in enumerate(found)]
        for cell, found in (DENSE | SPARSE).items()
    }
    storage = optuna.storages.InMemoryStorage()
    write_study(storage, cells, space={})
    record = read_study(storage, "fake")
    study = Analysis(record)
    rows = records(study.term_ratios)
    assert [row["k_star"] for row in rows] == pytest.approx([2, 4, None, 8**0.5])
    assert (rows[-1]["k_star_low"], rows[-1]["k_star_high"]) == (2, 4)
    rows = records(study.theory)
    assert [(row["k_star"], row["floor"]) for row in rows[:3]] == [(800, 0), (112, 0), (16, 1)]
    lines = theory_text(study).splitlines()
    assert [line.split("  ")[-1].strip() for line in lines[2:5]] == ["800", "112", "<= 16"]


def eight(steps):
    return {cell: [k] * 8 for cell, k in steps.items()}


def test_claims_on_k_star_are_judged_without_it():
    steps = {(2, 0.0): 8000, (8, 0.0): 2000, (32, 0.0): 512}
    with_it, without = study_of(eight(steps | {(512, 0.0): 16})), study_of(eight(steps))
    for claim in ("linear-scaling", "diminishing-returns"):
        expected = judged(claim, without)
        judgement = judged(claim, with_it)
        assert judgement.verdict == expected.verdict
        number, note = judgement.measured.split("; ")
        assert number == expected.measured and numbers_in(note) == [1]
    few = judged("linear-scaling", study_of(eight({(2, 0.0): 100, (8, 0.0): 16, (32, 0.0): 16})))
    assert few.measured.startswith("S=0: ") and numbers_in(few.measured) == [1, 3, 2, 2]


def test_steps_of_sparse_are_over_resolved_k_star():
    steps = {(8, 0.0): 16000, (8, 0.9): 32000, (32, 0.0): 16000, (32, 0.9): 48000}
    whole = judged("steps-of-sparse", study_of(eight(steps)))
    bound = study_of(eight(steps | {(512, 0.0): 16, (512, 0.9): 160}))
    judgement = judged("steps-of-sparse", bound)
    assert judgement.verdict == whole.verdict
    number, note = judgement.measured.split("; ", 1)
    # Of 3 batch sizes with a dense K*, 3 have a sparse one; at one of these, one is a bound.
    assert number == whole.measured and numbers_in(note) == [3, 3, 1]
    few = study_of(
        eight({(8, 0.0): 160, (8, 0.9): 320} | {(b, s): 16 for b in (32, 128) for s in (0.0, 0.9)})
    )
    judgement = judged("steps-of-sparse", few)
    assert judgement.verdict is Verdict.UNDECIDABLE
    assert numbers_in(judgement.measured) == [3, 3, 2]


def test_the_best_rate_is_that_of_resolved_k_star():
    space = {"model.learning_rate": Range(1e-4, 10, "log")}
    rates = {8: 0.01, 16: 0.02, 32: 0.05, 64: 0.1, 4096: 0.001}
    cells = {}
    for b, rate in rates.items():
        steps = 16 if b == 4096 else 800
        params = {"model.learning_rate": rate}
        cells[Cell(b, 0.0)] = [result(Cell(b, 0.0), i, steps, params=params) for i in range(8)]
    storage = optuna.storages.InMemoryStorage()
    write_study(storage, cells, space=space)
    record = read_study(storage, "fake")
    number, note = judged("rate-grows", Analysis(record)).measured.split("; ")
    # The correlation, and the rates at the least and the largest batch size that count.
    assert "at B=8 and B=64: 1 [" in number and number.endswith("], 0.0100, 0.100")
    assert numbers_in(note) == [1, 5]
    coarse = dataclasses.replace(record, goal=dataclasses.replace(GOAL, check_interval=800))
    said = judged("rate-grows", Analysis(coarse)).measured
    assert said.startswith("S=0: ") and numbers_in(said) == [0, 5, 4]
