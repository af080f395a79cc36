"""The last screen of a study: its size, its recommendation, its marks and its warnings."""

from __future__ import annotations

import dataclasses
import re

import pytest

from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.answer import fastest_of
from lit_dps.analysis.tables import in_parts
from lit_dps.core.config import StorageConfig
from lit_dps.core.search_space import Range
from lit_dps.core.step_timing import CellTiming, StepTiming
from lit_dps.core.text import format_interval, wrap
from lit_dps.core.trial import Cell, Series, Status
from lit_dps.core.unit import UNITS
from lit_dps.report.answer import (
    answer_lines,
    recommendation,
)
from lit_dps.report.notebook import Study
from lit_dps.report.notes import Level, Note, lines_of, warnings_of
from lit_dps.report.result_table import marks, result_rows, result_table
from lit_dps.report.screen import (
    MAX_WARNINGS,
    all_warnings,
    answer_part,
    law_text,
    more_line,
    protocol_line,
    screen,
    shown_warnings,
)
from lit_dps.report.text import SECTIONS, readings_text, sections
from lit_dps.report.timing_notes import best_at_end_of_batch_sizes, busy_machine, times_text
from lit_dps.report.warnings import (
    diverged_cells,
    failed_cells,
    first_check_bounds,
    missing_k_star,
    pending_trials,
)
from lit_dps.study.retrain_hint import retrain_hint
from tests.support.fake_study import analysis_of, law_results
from tests.unit.analysis.test_answer import K_STAR, record, timed, trial
from tests.unit.analysis.test_answer import study as made_up
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
            timings.append(CellTiming(cell, steps, 0.05))
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
    lines = screen(STUDIES[name](), SECTIONS, width=width).splitlines()
    assert max(map(len, lines)) <= width


@pytest.mark.parametrize("words", [False, True])
def test_columns_that_do_not_fit_follow_in_further_tables(words):
    rows = []
    for batch_size in ("8", "128"):
        row = {"B": batch_size, "S": "0"}
        rows.append(row | {f"column {i}": f"value {batch_size} {i}" for i in range(5)})
    whole = in_parts(rows, 2, None, words)
    assert whole == in_parts(rows, 2, 1000, words)
    lines = in_parts(rows, 2, 40, words)
    assert max(map(len, lines)) <= 40 < max(map(len, whole))
    tables = [table.splitlines() for table in "\n".join(lines).split("\n\n")]
    assert len(tables) > 1
    columns = []
    for table in tables:
        assert len(table) == len(whole) and table[0].split()[:2] == ["B", "S"]
        assert [line.split()[:2] for line in table[1:]] == [["8", "0"], ["128", "0"]]
        for i in re.findall(r"column (\d)", table[0]):
            columns.append(i)
            assert f"value 8 {i}" in table[1] and f"value 128 {i}" in table[2]
    assert columns == list("01234"), "each column is once in one of the tables"
    assert len(in_parts(rows, 2, 1, words)) == 5 * 3 + 4, "a column wider than all is whole"


def answer_of(results) -> str:
    """Return the recommendation for a study of one series, by K* itself."""
    return recommendation(Analysis(record(results)), Series(0.0))


def test_the_recommendation_names_tied_batch_sizes_and_the_rate_of_the_best_estimate(timed_study):
    best = timed_study.answer[timed_study.answer["fastest"]]["batch_size"].tolist()
    for series, batch_size in zip(timed_study.record.series, best, strict=True):
        line = recommendation(timed_study, series)
        tied = timed_study.answer[timed_study.answer["tied"]]
        sizes = tied[tied["sparsity"] == series.sparsity]["batch_size"].tolist()
        assert f"batch size {batch_size} " in line
        if not sizes[0] < batch_size < sizes[-1]:
            sizes.remove(batch_size)
        assert f" ({sizes[0]}-{sizes[-1]} may be as fast)." in line
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
    assert line.startswith("No recommendation so far")
    assert line.endswith("B = 8 needs the fewest steps, B = 4 the fewest examples.")
    ended = {b: [trial(b, i, K_STAR[b] * (b == 8), 0.0) for i in range(3)] for b in (4, 8)}
    ended[4] = [trial(4, i, 200, 0.0) for i in range(3)]
    assert "so far" not in answer_of(ended)


def test_the_recommendation_counts_validation_at_the_interval_of_the_user():
    study = Analysis(timed(made_up()), validate_every=10)
    line = recommendation(study, Series())
    assert "batch size 32 " in line and "1.50 s" in line and "every 10 steps" in line
    assert "unknown" in recommendation(Analysis(made_up(), validate_every=10), Series())


def test_marks_and_the_command_count_validation_as_the_recommendation_does():
    found = timed(made_up())
    fastest = {}
    for every in (None, 10):
        study = Analysis(found, validate_every=every)
        marked = [cell.cell for cell in study.cells if "fastest" in marks(study, cell)]
        assert marked == [fastest_of(study.answers)]
        assert f"--cell B={marked[0].batch_size},S=0 " in retrain_hint(study, StorageConfig())
        assert f"batch size {marked[0].batch_size} " in recommendation(study, Series())
        document = Study(found, study).to_dict()
        assert document["recommendation"]["batch_size"] == marked[0].batch_size
        assert "fastest" in document["recommendation"]["marks"]
        fastest[every] = marked[0].batch_size
    assert fastest == {None: 16, 10: 32}
    assert "with a validation every 10 steps" in protocol_line(study)
    (row,) = [line for line in result_table(study, 140) if line.strip().startswith("32")]
    assert "2.39 [" in row and "1.50 s" in row


def with_spread(ratio: float, batch_sizes=SIZES) -> Analysis:
    """Return a study with a good law whose step times vary by a factor, with weak warnings."""
    results = {}
    timings = []
    for batch_size in batch_sizes:
        cell = Cell(batch_size)
        results[cell] = law_results(cell, 4, 4e3, 40)
        steps = tuple(0.01 * slower for slower in (1 / ratio, 1 / ratio, 1.0, ratio, ratio))
        timings.append(CellTiming(cell, steps, 0.05))
    found = analysis_of(results, trials=4).record
    timing = StepTiming("Xeon, 2 cores", "2026-11-29", 1, 1, tuple(timings))
    return Analysis(dataclasses.replace(found, step_timing=timing))


def test_a_very_busy_machine_is_the_first_warning():
    for ratio, noise, is_very_busy in ((1.45, "8.67", False), (1.5, "10.6", True)):
        study = with_spread(ratio)
        (values,) = busy_machine(study, is_very_busy)
        # The 95 % interval of normal logarithms is 1.96 / 0.6745 times as wide as their quartiles.
        assert values == {"spread": f"{ratio**2:.3g}", "noise": noise}
        assert [*busy_machine(study, not is_very_busy)] == []
        shown = [f"x{ratio**2:.3g}" in warning for warning in shown_warnings(study, 100)]
        assert shown[0] is is_very_busy
        if not is_very_busy:
            (warning,) = [each for each in all_warnings(study) if "x2.1" in each]
            assert "x8.67" in warning, "smaller differences say nothing"
        assert len(all_warnings(study)) > 1


def test_a_cell_without_validation_times_is_not_compared_with_cells_that_have_some():
    """B = 16 of an earlier version is the fastest without validation."""
    found = timed(made_up())
    results = {**found.results, Cell(16): made_up().results[Cell(16)]}
    study = Analysis(dataclasses.replace(found, results=results), validate_every=10)
    assert study.answers[Cell(16)]["total_seconds"] is None
    assert fastest_of(study.answers) == Cell(32)
    assert marks(study, study.by_cell[Cell(16)]) == []
    # The steps of B = 16 include validations, so they are not compared with the steps of others.
    seconds = {cell.batch_size: row["seconds"] for cell, row in study.answers.items()}
    assert sorted(seconds, key=lambda b: seconds[b])[:2] == [16, 8]


def test_the_times_name_the_machine_and_whether_they_include_validation(timed_study):
    assert "Times: on Xeon, 2 cores, without validation." in protocol_line(timed_study)
    assert "with validation" in protocol_line(Analysis(made_up()))
    one = dataclasses.replace(timed(made_up()), environments=({"hardware": "EPYC, 2 cores"},))
    assert "Times: on EPYC, 2 cores, without validation." in protocol_line(Analysis(one))
    untimed = Analysis(record({4: [trial(4, 0, 40, 0.0)]}))
    assert "Times" not in protocol_line(untimed)


def test_the_rate_is_of_the_recommended_batch_size_alone():
    line = recommendation(Analysis(timed(made_up())), Series())
    assert "batch size 16 at learning rate 0.160" in line


def test_further_metaparameters_are_named():
    space = {"model.width": Range(1.0, 100.0, "log"), "optimizer.weight_decay": Range(0.0, 1.0)}
    params = {"model.learning_rate": 0.1, "model.width": 8.0, "optimizer.weight_decay": 0.5}
    found = record({4: [with_params(trial(4, i, 40, 1.0), params) for i in range(3)]})
    found = dataclasses.replace(found, space={**found.space, **space})
    line = recommendation(Analysis(found), Series())
    assert "learning rate 0.100, width 8.00, weight decay 0.500." in line


def with_cell(result, cell):
    """Return a trial of another cell."""
    return dataclasses.replace(result, trial=dataclasses.replace(result.trial, cell=cell))


def with_params(result, params):
    """Return a trial with other metaparameters."""
    return dataclasses.replace(result, trial=dataclasses.replace(result.trial, params=params))


def test_a_batch_size_without_k_star_is_not_between_the_tied_ones():
    results = {b: [trial(b, i, 40, 1.0) for i in range(3)] for b in (4, 16)}
    line = answer_of(
        {4: results[4], 8: [trial(8, i, None, 1.0) for i in range(3)], 16: results[16]}
    )
    assert "may be as fast" in line and "-" not in line and "8 " not in line


def test_cells_without_k_star_say_why_and_the_advice_fits():
    met = [trial(4, i, 40, 1.0) for i in range(3)]
    results = {
        4: met,
        8: [trial(8, i, None, 1.0, Status.FAILED) for i in range(3)],
        16: [trial(16, i, None, 1.0, Status.INFEASIBLE) for i in range(3)],
        32: [trial(32, i, None, 1.0) for i in range(3)],
        64: [trial(64, 0, None, 1.0)],
    }
    study = Analysis(record(results))
    words = [marks(study, cell)[0] for cell in study.cells[1:]]
    assert words == ["failed", "diverged", "goal not reached", "unfinished"]
    (missing,) = missing_k_star(study)
    assert (missing["count"], missing["cells"]) == (1, 5)
    (failed,) = failed_cells(study)
    assert (failed["count"], failed["names"]) == (1, str(Cell(8)))
    (diverged,) = diverged_cells(study)
    assert (diverged["count"], diverged["names"]) == (1, str(Cell(16)))


def test_trials_that_all_failed_have_ended():
    failed = [trial(4, i, None, 1.0, Status.FAILED) for i in range(3)]
    assert answer_of({4: failed}) == "No recommendation: all trials that ended failed."


def test_the_law_is_of_the_statistic_of_the_column_by_law():
    study = STUDIES["repeats"]()
    (law,) = study.laws_of_answer.values()
    assert law is study.median_laws[Series()]
    assert law.steps(4) == pytest.approx(study.answers[Cell(4)]["steps"])
    assert law_text(law) in screen(study, width=1000)
    assert law_text(law).startswith("median K over seeds = 86000 ")


def test_a_refused_law_has_its_reason_once():
    steps = {4: 220, 8: 360, 16: 56, 32: 180, 64: 32}
    study = Analysis(record({b: [trial(b, i, k, 1.0) for i in range(3)] for b, k in steps.items()}))
    law = study.laws[Series()]
    assert law.fit is not None and law_text(law) == f"No law: {law.verdict}"


def test_k_star_in_examples_has_its_own_column_of_steps():
    curve = {"step": [36, 40], "val_error": [0.5, 0.05], "train_loss": [1.0, 1.0]}
    unit = UNITS["examples"]
    results = {}
    for b in (4, 8):
        counted = {**curve, "examples": [36 * b, 40 * b]}
        met = [
            dataclasses.replace(trial(b, i, 40, 1.0), curve=counted, unit=unit) for i in range(3)
        ]
        results[b] = met
    found = record(results)
    found = dataclasses.replace(found, goal=dataclasses.replace(found.goal, unit="examples"))
    head, first, *_ = result_table(Analysis(found), 140)
    assert head.split()[:4] == ["B", "K*", "[examples]", "steps"]
    assert first.split()[:3] == ["4", "160", "40"]


def test_k_star_is_not_final_while_trials_are_pending():
    met = [trial(4, i, 40, 1.0) for i in range(3)]
    assert "the best of 3 trials" in protocol_line(Analysis(record({4: met})))
    assert "so far of at most 3 trials" in protocol_line(Analysis(record({4: met[:2]})))


def test_bounds_are_named_since_they_may_be_faster():
    found = {4: [trial(4, 0, 40, 1.0)], 64: [trial(64, 0, 4, 1.0)]}
    (values,) = first_check_bounds(Analysis(record(found)))
    assert (values["places"], values["count"]) == ("B = 64", 1)


def test_one_complete_trial_of_a_median_reached_the_goal():
    met = [trial(8, i, 40, 1.0) for i in range(3)]
    some = [trial(4, 0, 40, 1.0), *(trial(4, i, None, 1.0) for i in (1, 2))]
    study = Analysis(record({4: some, 8: met})).with_statistic("median_of_best_3")
    assert marks(study, study.cells[0]) == ["too few reached the goal"]
    assert recommendation(study, Series()).endswith("No other batch size has a K*.")


def test_dense_cells_that_share_trials_count_once():
    axis = "pruning.method"
    methods = ("random", "snip")
    first, second = (Cell(8, 0.0, ((axis, method),)) for method in methods)
    grid = {"axes": {axis: methods}, "results": {first: [], second: []}}
    running = {first: 0, second: 0}
    found = dataclasses.replace(record({8: []}), running=running, shared={second: first}, **grid)
    study = Analysis(found)
    (values,) = pending_trials(study)
    assert (values["pending"], values["declared"]) == (3, 3)
    (line,) = answer_part(study, 140)
    assert line.startswith("S=0 method=random; S=0 method=snip: No recommendation")
    met = [with_cell(trial(8, i, 40, 1.0), first) for i in range(3)]
    answered = Analysis(dataclasses.replace(found, results={first: met, second: met}))
    lines = [line for line in answer_lines(answered) if not line.startswith(" ")]
    assert len(lines) == 1 and lines[0].startswith("S=0 method=random; S=0 method=snip: Train")


def test_the_best_at_an_end_of_the_batch_sizes_is_a_warning():
    met = {b: [trial(b, 0, k, 1 + 0.01 * k)] for b, k in {4: 112, 8: 64}.items()}
    (values,) = best_at_end_of_batch_sizes(Analysis(record(met, trials=1)))
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
    assert len(section) > len(all_warnings(study))
    hidden = len(all_warnings(study)) - len(shown_warnings(study, 1000))
    assert f"notes ({hidden} more warnings)" in more_line(study, (), 1000)
    assert "notes" not in more_line(study, ["notes"], 1000)
    clear = STUDIES["local"]()
    assert len(all_warnings(clear)) == len(shown_warnings(clear, 100)) == 1
    assert "notes, " in more_line(clear, (), 1000)
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


def with_readings(names: tuple[str, ...]) -> Analysis:
    """Return a study in which reading i has the value 10 + i at K*, and a later one after it."""
    found = timed(made_up())
    results = {}
    for cell, trials in found.results.items():
        results[cell] = []
        for each in trials:
            end = each.curve["step"][-1]
            readings = {}
            for i, name in enumerate(names):
                readings[name] = {"step": [2, end, end + 4], name: [1.0, 10.0 + i, 99.0]}
            results[cell].append(dataclasses.replace(each, readings=readings))
    return Analysis(dataclasses.replace(found, results=results))


def test_the_table_has_readings_as_far_as_the_width_allows():
    study = with_readings(("sharpness", "loudness"))
    head, *rows = [line.split() for line in result_table(study, 140)]
    assert head[-2:] == ["sharpness", "loudness"]
    for row in rows:
        assert [text for text in row if text not in ("fastest", "tied")][-2:] == ["10", "11"]
    narrow = result_table(study, 90)
    assert "sharpness" in narrow[0] and "loudness" not in narrow[0]
    assert narrow[-1] == "Not shown at this width: loudness."
    for width in (60, 90, 140):
        assert max(map(len, result_table(study, width))) <= width
    assert {"sharpness", "loudness"} <= set(readings_text(study).splitlines()[1].split())


def test_a_reading_replaces_no_column_of_the_table():
    study = with_readings(("B", "K*"))
    plain = Analysis(timed(made_up()))
    for row, without in zip(result_rows(study), result_rows(plain), strict=True):
        assert (row["B"], row["K*"]) == (without["B"], without["K*"])
        assert (row["B (reading)"], row["K* (reading)"]) == ("10", "11")
    assert "B (reading)" in readings_text(study)


@pytest.mark.parametrize("validate_every", [None, 10])
def test_the_answer_says_whether_its_times_include_validation(validate_every):
    study = Analysis(with_spread(1.1).record, validate_every=validate_every)
    answer = sections(study, ["answer"])["answer"]
    assert answer.splitlines()[-1] == times_text(study)
    assert ("without validation" in answer) is (validate_every is None)
