"""One answer, wherever it is shown: printed, in a notebook, as CSV, in the report
page."""

from __future__ import annotations

import html
import re

import numpy as np
import pandas as pd
import pytest

import lit_dps
from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.tables import three_digits
from lit_dps.core.text import format_duration, format_interval
from lit_dps.core.trial import Cell
from lit_dps.report.answer import recommendation, recommendation_sentences
from lit_dps.report.html import page
from lit_dps.report.publish import publish
from lit_dps.report.result_table import interval_text, result_table
from lit_dps.report.timing_notes import TIMING, steps_of_trials
from lit_dps.tracking.description import cell_outcomes, markdown
from tests.support.fake_study import result, write_study
from tests.unit.analysis.test_answer import GOAL, NOISE, SPACE, timed
from tests.unit.analysis.test_answer import study as made_up

RATE = {"model.learning_rate": 0.1}


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    folder = tmp_path_factory.mktemp("agrees")
    cells = {}
    for sparsity, slower in ((0.0, 1.0), (0.9, 1.6)):
        for b, noise in NOISE.items():
            k, each = 4 * round(slower * (800 / b + 20) * noise / 4), 0.01 + 3e-4 * b
            cells[Cell(b, sparsity)] = [
                result(
                    Cell(b, sparsity),
                    i,
                    x,
                    params=RATE,
                    curve={"step": [x]},
                    seconds=x * each * (1 + i / 50),
                )
                for i, x in enumerate((k, k + 8, k + 16))
            ]
    write_study(f"sqlite:///{folder}/study.db", cells, "made up", goal=GOAL, space=SPACE)
    return lit_dps.load("made up", folder)


def printed(lines):
    """The rows of the table of results: cells by column."""
    head, *lines = lines
    ends = {}
    for name in ("B", "S", "K*", "by law", "examples", "a step", "time to goal [95 %]"):
        ends[name] = head.index(name) + len(name)
    rows = []
    for line in lines:
        begin = 0
        row = {}
        for name, end in ends.items():
            row[name] = line[begin:end].strip()
            begin = end
        rows.append(row | {"mark": line[begin:].split(maxsplit=1)[1:]})
    return rows


def test_the_printed_table_is_that_of_a_notebook(study):
    table = study.answer
    rows = printed(result_table(study.analysis, 100))
    assert len(rows) == len(table) == 12
    for shown, (_, row) in zip(rows, table.iterrows(), strict=True):
        assert (shown["B"], shown["S"]) == (str(row["batch_size"]), f"{row['sparsity']:g}")
        assert (shown["K*"], shown["by law"]) == (str(row["k_star"]), three_digits(row["steps"]))
        assert (shown["examples"], shown["a step"]) == (
            three_digits(row["examples"]),
            format_duration(row["step_seconds"]),
        )
        time = format_interval(row["seconds"], row["seconds_low"], row["seconds_high"])
        assert shown["time to goal [95 %]"] == time
        mark = "fastest" if row["fastest"] else "tied" if row["tied"] else None
        assert shown["mark"] == ([mark] if mark else [])
        assert row["seconds_low"] <= row["seconds"] <= row["seconds_high"]
        assert row["seconds"] == pytest.approx(row["steps"] * row["step_seconds"])


def test_csv_and_page_say_the_same(study, tmp_path):
    publish(study.analysis, tmp_path)
    kept = pd.read_csv(next(tmp_path.rglob("answer.csv")), keep_default_na=False, na_values=[""])
    table = study.answer
    assert list(kept.columns) == list(table.columns)
    for name in ("k_star", "steps", "seconds", "seconds_low", "seconds_high", "training_seconds"):
        np.testing.assert_allclose(kept[name].astype(float), table[name].astype(float), rtol=1e-12)
    text = page(study.analysis)
    for series in study.analysis.record.series:
        assert recommendation(study.analysis, series).rstrip(".") in html.unescape(text)
    shown = table_of(text, 1)
    head, *lines = result_table(study.analysis, 100)
    assert [row[0] for row in shown] == ["B", *(line.split()[0] for line in lines)]
    assert ["".join(row).replace(" ", "") for row in shown] == [
        line.replace(" ", "") for line in (head, *lines)
    ]


def table_of(text, number):
    """The texts of a table of a page, by row."""
    table = re.findall(r"<table.*?</table>", text)[number]
    rows = []
    for row in re.findall(r"<tr.*?</tr>", table):
        rows.append(list(map(html.unescape, re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row))))
    return rows


def test_the_page_has_the_printed_answer_with_validation():
    validated = Analysis(timed(made_up()), validate_every=10)
    text = html.unescape(page(validated)).replace("\xa0", " ")
    (series,) = validated.record.series
    for sentence in recommendation_sentences(validated, series):
        assert sentence in text.split("<details")[0]
    assert "a validation every 10" in text
    time = interval_text(validated.answers[Cell(32)])
    first_screen = re.sub("<table.*?</table>", "", text.split("<details")[0], flags=re.DOTALL)
    assert time.startswith("2.39 [") and time.endswith("] s")
    assert first_screen.count(time) == 1 and "2.39 s" not in first_screen
    description = re.sub(r"^\|.*", "", markdown(validated), flags=re.MULTILINE)
    assert description.count(time) == 1 and "2.39 s" not in description


def test_mlflow_has_the_times_of_the_table():
    for every in (None, 10):
        study = Analysis(timed(made_up()), validate_every=every)
        table = study.answer.set_index("batch_size")
        for outcome in cell_outcomes(study):
            row = table.loc[outcome.cell.batch_size]
            assert outcome.metrics["seconds_to_goal"] == row["seconds"]
            assert outcome.metrics["total_seconds_to_goal"] == row["total_seconds"]
        assert (table["total_seconds"] > table["seconds"]).all() == (every is not None)


def test_the_description_in_mlflow_has_the_details_of_warnings():
    study = Analysis(timed(made_up()))
    (note,) = [note for note in TIMING if note.condition is steps_of_trials]
    (values,) = steps_of_trials(study)
    assert note.detail.format(**values) in markdown(study)
    assert markdown(study).count(note.sentence) == 1
