"""A file that cannot be written, and a figure that cannot be drawn, cost neither the table nor the
answer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lit_dps.analysis.analysis import Analysis
from lit_dps.core.goal import Goal
from lit_dps.report.figures import FIGURES
from lit_dps.report.publish import SHOWN_FAILURES, publish
from lit_dps.report.screen import screen
from tests.unit.report.test_figures import read


@pytest.fixture(scope="module")
def study():
    return Analysis(read(trials=4, batch_sizes=(4, 64), laws={0.0: (4e3, 60)}))


def test_where_nothing_can_be_written_the_answer_is_printed(study, tmp_path):
    (tmp_path / "figures").write_text("a file in the folder's place")
    text, files = publish(study, tmp_path / "figures")
    assert files == []
    assert text.startswith(screen(study))
    failed = [line for line in text.splitlines() if line.startswith("not written: ")]
    assert len(failed) == SHOWN_FAILURES + 1
    assert "table.txt" in failed[0] and f"{tmp_path}/figures/table.txt" in failed[0]
    assert "report: " not in text


def test_a_figure_that_fails_is_named_and_the_others_are_drawn(study, tmp_path, monkeypatch):
    scaling = FIGURES[0]
    monkeypatch.setattr(scaling, "rows", lambda *studies: 1 / 0)
    text, files = publish(study, tmp_path)
    (line,) = [line for line in text.splitlines() if f"figure {scaling.NAME}:" in line]
    assert "ZeroDivisionError" in line
    assert (tmp_path / "report.html") in files or "written: report.html" in text
    assert not (tmp_path / f"{scaling.NAME}.png").exists() and (tmp_path / "logs.png").exists()
    monkeypatch.undo()
    assert (tmp_path / f"{scaling.NAME}.png") in publish(study, tmp_path)[1], (
        "it is drawn the next time"
    )


def with_metric(record, name):
    """Return a record whose curves hold the goal's metric under this name."""
    results = {}
    for cell, of_cell in record.results.items():
        results[cell] = [
            replace(
                each,
                curve={
                    name if key == "val_error" else key: values
                    for key, values in each.curve.items()
                },
            )
            for each in of_cell
        ]
    return replace(record, results=results)


MORE_NAMES = [pytest.param(name, marks=pytest.mark.long) for name in ("val_$x$", "$", "a$b")]


@pytest.mark.parametrize("name", ["$\\frac{$", *MORE_NAMES])
def test_a_dollar_is_a_letter(name, tmp_path):
    goal = Goal(0.1, check_interval=16, max_steps=40_000, metric=name)
    read_back = read(trials=4, batch_sizes=(4, 64), laws={0.0: (4e3, 60)}, goal=goal)
    study = Analysis(with_metric(read_back, name))
    text, files = publish(study, tmp_path)
    assert "not written" not in text
    assert Path(tmp_path / "scaling.png") in files and (tmp_path / "logs.png") in files
