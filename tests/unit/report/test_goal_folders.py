"""Further goals of a study: a report and a folder of files for each."""

import csv

from lit_dps.analysis.analysis import Analysis
from lit_dps.core.trial import Cell, Series
from lit_dps.report.publish import publish
from lit_dps.report.screen import screen
from lit_dps.report.text import SECTIONS, parts_of, requested, table_and_law
from tests.support.fake_study import result
from tests.support.texts import in_one_line, numbers_in
from tests.unit.report.test_figure_files import MIDDLE, NO_SMOOTHNESS
from tests.unit.report.test_figures import read


def test_further_goals_have_a_folder_each(tmp_path):
    cells = [Cell(b, 0.0) for b in (8, 16, 64)]
    curve = {"step": [16, 32, 48], "val_error": [0.4, 0.25, 0.1], "train_loss": [2.0, 1.0, 0.5]}
    record = read(
        {c: [result(c, 0, 48, params=MIDDLE, curve=curve)] for c in cells}, goals=[0.3, 0.4]
    )
    study = Analysis(record)
    text, files = publish(study, tmp_path)
    assert study.laws[Series(0.0)].k_star == {8: 48, 16: 48, 64: 48}
    reports = [(tmp_path / name / "table.txt").read_text() for name in ("", "goal-0.4", "goal-0.3")]
    assert [
        f"goal error {goal}" in report
        for goal, report in zip((0.1, 0.4, 0.3), reports, strict=True)
    ] == [True] * 3
    printed = "\n".join(map(screen, study.at_each_goal))
    assert text.startswith(printed)
    more, page = text.removeprefix(printed).strip().splitlines()
    assert page == f"report: {tmp_path}/report.html"
    assert "critical" in more and "files" in more and "theory" not in more
    text, _ = publish(study, tmp_path, parts_of("all"), width=200)
    printed = "\n".join(screen(each, SECTIONS, width=200) for each in study.at_each_goal)
    assert text.startswith(f"{printed}\nwritten:\n")
    tables = [table_and_law(each, 200) for each in study.at_each_goal]
    assert all(in_one_line(table) in in_one_line(text) for table in tables)
    assert text.endswith(f"{page}\n"), "nothing more"
    ui = "trials in MLflow: lit-dps ui"
    narrow, _ = publish(study, tmp_path, width=60, ui=f"; {ui}")
    assert narrow.endswith(f"{page}\n{ui}\n"), "path and command stay whole"
    assert {str(path.parent.relative_to(tmp_path)) for path in files} == {
        ".",
        "goal-0.3",
        "goal-0.4",
    }
    assert all(path.is_file() for path in files)
    with (tmp_path / "goal-0.3" / "table.csv").open(newline="") as file:
        assert [row["k_star"] for row in csv.DictReader(file)] == ["32"] * 3
    said = [line for line in text.splitlines() if "figure" in line and line.startswith("note: ")]
    # Each once; with its goal where the study's own goal does not share it.
    smoothness, of_ratios, of_logs = said
    assert smoothness == f"note: {NO_SMOOTHNESS}" and "ratios" in of_ratios and "logs" in of_logs
    assert numbers_in(of_logs) == [0.4]


def test_a_section_without_data_has_a_reason_on_request():
    curve = {"step": [16, 32], "val_error": [0.4, 0.1], "train_loss": [2.0, 0.5]}
    cell = Cell(8, 0.0)
    study = Analysis(read({cell: [result(cell, 0, 32, params=MIDDLE, curve=curve)]}))
    plain = screen(study)
    for name in ("critical", "theory", "readings", "repeats", "delay", "local"):
        reason, *others = screen(study, [name]).removeprefix(plain).strip().splitlines()
        assert reason.startswith(f"{name}: ")
        assert all(line.startswith("  ") for line in others)
        assert len(requested(study, [name])) == 1
    assert len(requested(study, SECTIONS)) == len(SECTIONS)
