"""The last screen of a study: its size, its recommendation, its marks and its warnings."""

from __future__ import annotations

import dataclasses

import pytest

from lit_dps.analysis.analysis import Analysis
from lit_dps.core.config import StorageConfig
from lit_dps.core.step_timing import CellTiming, StepTiming
from lit_dps.core.text import format_interval, wrap
from lit_dps.core.trial import Cell, Series
from lit_dps.report.answer import recommendation
from lit_dps.report.notes import Level, Note, lines_of, warnings_of
from lit_dps.report.result_table import marks, result_table
from lit_dps.report.screen import MAX_WARNINGS, more_line, screen, shown_warnings
from lit_dps.report.text import SECTIONS
from lit_dps.report.timing_notes import best_at_end_of_batch_sizes
from lit_dps.study.retrain_hint import retrain_hint
from tests.support.fake_study import analysis_of, law_results
from tests.unit.analysis.test_answer import K_STAR, record, trial
from tests.unit.report.test_golden import STUDIES

SIZES = (8, 16, 32, 64, 128)
MAX_LINES = 25


@pytest.fixture(scope="module")
def timed_study() -> Analysis:
    """Two series of five batch sizes whose steps were timed, with several warnings."""
    laws = {0.0: (4e3, 40), 0.9: (9e3, 80)}
    results = {}
    timings = []
    for sparsity, law in laws.items():
        for batch_size in SIZES:
            cell = Cell(batch_size, sparsity)
            results[cell] = law_results(cell, 4, *law)
            seconds = 0.004 + 1e-4 * batch_size
            steps = tuple(seconds * slower for slower in (0.9, 1.0, 1.5))
            timings.append(CellTiming(cell, steps, (0.05,)))
    study = analysis_of(results, "quickstart", trials=4)
    timing = StepTiming("Xeon, 2 cores", "2026-11-29", 1, 1, tuple(timings))
    return Analysis(dataclasses.replace(study.record, step_timing=timing))


def last_screen(study: Analysis, width: int) -> str:
    """Return all that the command prints at its end."""
    text = screen(study, width=width) + more_line(study, (), width)
    report = "report: mlruns/figures/quickstart/report.html; trials in MLflow: lit-dps ui\n"
    return text + report + retrain_hint(study, StorageConfig())


@pytest.mark.parametrize("width", [100, 140])
def test_two_series_of_five_batch_sizes_have_at_most_25_lines(timed_study, width):
    lines = last_screen(timed_study, width).splitlines()
    assert len(lines) <= MAX_LINES
    assert len(shown_warnings(timed_study, width)) >= 2
    assert max(map(len, lines)) <= width


@pytest.mark.parametrize("name", STUDIES)
@pytest.mark.parametrize("width", [60, 100, 140])
def test_lines_are_as_wide_as_the_terminal_at_most(name, width):
    lines = screen(STUDIES[name](), width=width).splitlines()
    assert max(map(len, lines)) <= width


def answer_of(results) -> str:
    """Return the recommendation for a study of one series, by K* itself."""
    return recommendation(Analysis(record(results)), Series(0.0))


def test_the_recommendation_names_tied_batch_sizes_and_the_rate_of_the_best_estimate(timed_study):
    best = timed_study.answer[timed_study.answer["fastest"]]["batch_size"].tolist()
    for series, batch_size in zip(timed_study.record.series, best, strict=True):
        line = recommendation(timed_study, series)
        tied = timed_study.answer[timed_study.answer["tied"]]
        sizes = tied[tied["sparsity"] == series.sparsity]["batch_size"].tolist()
        assert f"batch size {sizes[0]} to {sizes[-1]} (best: {batch_size})" in line
        params = timed_study.by_cell[Cell(batch_size, series.sparsity)].best.trial.params
        assert f"learning rate {params['model.learning_rate']:#.3g}" in line
        assert len(line) <= 100


def test_a_clear_winner_is_recommended_alone():
    seconds = {b: k * (0.02 if b == 16 else 0.1) for b, k in K_STAR.items()}
    line = answer_of({b: [trial(b, 0, k, seconds[b])] for b, k in K_STAR.items()})
    assert line.startswith("So far, train with batch size 16 at learning rate 0.1")


def test_without_a_result_nothing_is_recommended():
    missed = [trial(4, i, None, 1.0) for i in range(3)]
    assert answer_of({4: missed, 8: []}).startswith("No recommendation: no trial reached")
    assert answer_of({4: [], 8: []}) == "No recommendation: no trial has ended yet."


def test_k_star_at_one_batch_size_is_named_as_such():
    met = [trial(8, i, 40, 1.0) for i in range(3)]
    missed = [trial(4, i, None, 1.0) for i in range(3)]
    line = answer_of({4: missed, 8: met})
    assert "batch size 8 " in line and line.endswith("No other batch size reached the goal.")
    assert answer_of({8: met}).endswith("It is the only batch size of the study.")


def test_without_times_the_fewest_steps_and_examples_are_named():
    line = answer_of({b: [trial(b, 0, K_STAR[b], 0.0)] for b in (4, 8)})
    assert "batch size 8 for the fewest steps, 4 for the fewest examples" in line


def test_the_best_at_an_end_of_the_batch_sizes_is_a_warning():
    met = {b: [trial(b, 0, k, 1 + 0.01 * k)] for b, k in {4: 112, 8: 64}.items()}
    (values,) = best_at_end_of_batch_sizes(Analysis(record(met)))
    assert values == {"ends": "above 8"}
    assert [*best_at_end_of_batch_sizes(Analysis(record({4: met[4]})))] == []


def test_marks_name_edges_and_cells_without_k_star():
    study = STUDIES["noted"]()
    assert [marks(study, cell) for cell in study.cells] == [
        ["edge"],
        ["unfinished"],
        ["edge"],
        ["unfinished"],
    ]
    missed = Analysis(record({4: [trial(4, i, None, 1.0) for i in range(3)]}))
    assert marks(missed, missed.cells[0]) == ["goal not reached"]


def test_the_most_harmful_warnings_come_first_and_information_is_left_out():
    always = [{"name": "a"}]
    notes = [
        Note(lambda study: always, "weak {name}", "detail", Level.WEAK),
        Note(lambda study: always, "information"),
        Note(lambda study: always, "wrong", level=Level.WRONG),
    ]
    study = STUDIES["refused"]()
    assert warnings_of(notes, study) == ["wrong", "weak a"]
    assert lines_of(notes, study) == ["weak a detail", "information", "wrong"]


def test_further_notes_are_counted_and_printed_on_request():
    study = STUDIES["noted"]()
    assert 1 <= len(shown_warnings(study, 100)) <= MAX_WARNINGS
    section = screen(study, ["notes"]).removeprefix(screen(study)).strip().splitlines()
    more = len(section) - len(shown_warnings(study, 100))
    assert f"notes ({more} more)" in more_line(study, (), 1000)
    assert "notes" not in more_line(study, ["notes"], 1000)
    assert more_line(study, (*SECTIONS, "files"), 1000) == ""


def test_a_narrow_table_names_the_columns_that_it_leaves_out(timed_study):
    wide = result_table(timed_study, 140)
    narrow = result_table(timed_study, 60)
    assert max(map(len, narrow)) <= 60
    assert "a step" in wide[0] and "a step" not in narrow[0] and "a step" in " ".join(narrow[11:])
    assert len(wide) == 11 < len(narrow)


def test_intervals_have_one_unit_and_equations_stay_on_a_line():
    assert format_interval(0.558, 0.198, 1.19) == "558 [198, 1190] ms"
    assert format_interval(84.0, 52.7, 136.2) == "84.0 [52.7, 136] s"
    assert wrap("at B = 8 there", 7) == ["at", "  B = 8", "  there"]
