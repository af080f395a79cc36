"""The report page of a study: what it says, that it is safe to open and needs nothing beside
itself."""

import dataclasses
import html
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from lit_dps.analysis.analysis import Analysis
from lit_dps.core.goal import Goal
from lit_dps.core.record import grid
from lit_dps.core.trial import Cell, Status, Trial, TrialResult
from lit_dps.report.html import page
from lit_dps.report.html.charts import curve, parallel
from lit_dps.report.publish import publish, source_of
from tests.support.fake_study import analysis_of, law_results, result

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"


class Page(HTMLParser):
    """All tags with their attributes, and what the sortable table holds."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.rows, self._cell = [], [], False
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag == "tr":
            self.rows.append([])
        self._cell = tag in ("td", "th")

    def handle_data(self, data):
        if self._cell:
            self.rows[-1].append(data)
            self._cell = False


@pytest.fixture(scope="module")
def study():
    cells = {cell: law_results(cell, 6, 4e4, 60) for cell in grid((4, 16, 64), (0.0, 0.9))}
    return analysis_of(cells, trials=6)


@pytest.fixture(scope="module")
def text(study):
    return page(study)


def charts(text):
    """The data of each plotly chart, by its number."""
    found = re.findall(r'Plotly\.newPlot\(\s*"chart-(\d+)",\s*(\[.*?\]),\s*\{', text, re.DOTALL)
    return {int(number): json.loads(data) for number, data in found}


def test_it_draws_the_k_stars_of_the_table(study, text):
    drawn = set()
    for trace in charts(text)[1]:
        if trace.get("mode") == "markers":
            drawn |= set(zip(trace["x"], trace["y"], strict=True))
    assert drawn == {(c.cell.batch_size, c.k_star) for c in study.cells if c.k_star is not None}


def test_its_ticks_are_the_batch_sizes_and_the_doublings_that_the_law_is_drawn_to(study):
    assert list(curve(study).layout.xaxis.tickvals) == [4, 16, 64, 128, 256]
    two = analysis_of({Cell(b): [result(Cell(b), 0, 320)] for b in (4, 16)}, space={})
    assert list(curve(two).layout.xaxis.tickvals) == [4, 16], "no law to draw"


def test_every_finished_trial_is_in_the_table_with_the_fewest_steps_first(study, text):
    head, *rows = Page(text).rows
    steps = [row[head.index("steps")] for row in rows]
    known = [int(s) for s in steps if s != "-"]
    assert len(rows) == len(study.trials)
    assert known == sorted(study.trials["steps"].dropna()) and set(steps[len(known) :]) <= {"-"}
    best = [attributes for tag, attributes in Page(text).tags if attributes.get("class") == "best"]
    assert len(best) == sum(c.k_star is not None for c in study.cells)


def test_the_ends_of_trials_have_the_names_of_the_table(study):
    figure = parallel(study)
    assert figure is not None
    last = figure.data[0].dimensions[-1]
    assert set(last.ticktext) <= {"met goal", "missed goal", "diverged"} and last.ticktext
    assert set(last.values) == set(last.tickvals)


def test_no_external_address_is_loaded(text):
    for tag, attributes in Page(text).tags:
        for name in ("src", "href", "action", "data", "srcset"):
            assert not attributes.get(name), (tag, attributes)
    assert '"showSendToCloud": false' in text
    assert "@import" not in text.split("<script", 1)[0]


def test_what_users_name_is_escaped(study):
    record = study.record
    cell = record.cells[0]
    failed = TrialResult(Trial(cell, 99, {}, 0), Status.FAILED, None, failure=EVIL, traceback=EVIL)
    axis = (("model.network", EVIL),)
    results = {Cell(c.batch_size, c.sparsity, axis): found for c, found in record.results.items()}
    results[Cell(cell.batch_size, cell.sparsity, axis)] = [failed]
    hostile = dataclasses.replace(
        record,
        name=EVIL,
        workload=EVIL,
        results=results,
        running=dict.fromkeys(results, 0),
        axes={"model.network": (EVIL,)},
        config={"model": EVIL},
    )
    text = page(Analysis(hostile, replicates=50))
    assert "<script>alert" not in text and "<img" not in text.split("</head>")[1]
    assert html.escape(EVIL) in text


def test_a_study_without_results_has_a_page(study):
    record = study.record
    empty = dataclasses.replace(record, results={cell: [] for cell in record.cells})
    text = page(Analysis(empty))
    assert not charts(text) and "not finished" in text


def test_it_is_written_beside_the_figures_and_the_same_each_time(study, text, tmp_path):
    _, files = publish(study, tmp_path)
    assert tmp_path / "report.html" in files
    assert (tmp_path / "report.html").read_text() == text


def test_a_study_that_was_used_is_made_from_the_same(study):
    unused, used = Goal(0.1, 16, 400), Goal(0.1, 16, 400)
    assert used.is_pointwise and not used.limits
    records = [dataclasses.replace(study.record, goal=goal) for goal in (unused, used)]
    assert source_of(records[0]) == source_of(records[1])


def test_a_page_of_another_frame_is_written_anew(study, monkeypatch):
    """The frame is part of what a study's files are made from, as is the code."""
    before, read = source_of(study.record), Path.read_bytes
    assert source_of(study.record) == before
    for changed in ("page.html", "charts.py"):
        with monkeypatch.context() as patch:
            patch.setattr(
                Path,
                "read_bytes",
                lambda path, name=changed: read(path) + b" " * (path.name == name),
            )
            assert source_of(study.record) != before, changed
