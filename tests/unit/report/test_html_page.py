"""The report page of a study: what it says, that it is safe to open and needs nothing beside
itself."""

import dataclasses
import html
import io
import math
import re
from base64 import b64decode
from html.parser import HTMLParser
from itertools import product
from pathlib import Path
from types import ModuleType

import numpy as np
import PIL.Image
import pytest
from matplotlib.figure import Figure

from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.answer import MEDIAN
from lit_dps.core.goal import Goal
from lit_dps.core.record import grid
from lit_dps.core.search_space import ExpandedSpace, Range
from lit_dps.core.trial import Cell, Status, Trial, TrialResult
from lit_dps.report.figures.page_pictures import MAX_SVG_BYTES, picture_of
from lit_dps.report.html import page
from lit_dps.report.publish import publish, source_of
from lit_dps.report.screen import law_text, screen
from tests.support.fake_study import analysis_of, law_results, result
from tests.support.pictures import KEY
from tests.unit.report.test_golden import repeated_study

KEYS = ("model.learning_rate", "model.momentum")
EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"


class Page(HTMLParser):
    """All tags with their attributes, and the texts of the table of trials."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.rows = [], []
        self._in_trials = self._cell = False
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag == "table":
            self._in_trials = dict(attributes).get("class") == "sortable"
        if tag == "tr" and self._in_trials:
            self.rows.append([])
        if tag in ("td", "th"):
            self._cell = self._in_trials

    def handle_data(self, data):
        if self._cell:
            self.rows[-1].append(data)
            self._cell = False

    def attributes(self, tag):
        """The attributes of each element of a tag."""
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.fixture(scope="module")
def study():
    cells = {cell: law_results(cell, 6, 4e4, 60) for cell in grid((4, 16, 64), (0.0, 0.9))}
    return analysis_of(cells, trials=6)


@pytest.fixture(scope="module")
def text(study):
    return page(study)


@pytest.fixture(scope="module")
def drawn(study, tmp_path_factory):
    """The page with its pictures."""
    folder = tmp_path_factory.mktemp("drawn")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(KEY, raising=False)
        publish(study, folder)
    return (folder / "report.html").read_text()


def svgs(text):
    """The pictures of a page that are SVG."""
    found = re.findall(r'src="data:image/svg\+xml;base64,([^"]+)"', text)
    return [b64decode(data).decode() for data in found]


def test_its_first_line_is_the_first_line_of_the_last_screen(study, text):
    lines = screen(study, width=10_000).splitlines()
    large = re.findall(r'<p class="answer">(.*?)</p>', text)
    assert len(large) == len(study.record.series) == 2
    for line, answer in zip(lines, large, strict=False):
        assert line.startswith(html.unescape(answer)), line
    after = html.unescape(text).replace("\xa0", " ")
    for series, law in study.laws_of_answer.items():
        assert f"{law_text(law)}." in after, series
    assert text.index("</h1>") < text.index(large[0]) < text.index("<details")


def test_the_law_is_of_the_statistic_that_the_times_use():
    study = repeated_study()
    assert set(study.answer["steps_of"]) == {MEDIAN}
    text = html.unescape(page(study)).replace("\xa0", " ")
    (medians,) = study.laws_of_answer.values()
    (k_stars,) = study.laws.values()
    assert str(medians.verdict) != str(k_stars.verdict)
    first_screen = text.split("<details")[0]
    assert f"Median K over seeds = {law_text(medians).split(' = ', 1)[1]}" in first_screen
    assert k_stars.describe() not in first_screen


def test_an_expanded_search_space_is_named_with_its_commands(study):
    rate, wide = Range(1e-3, 1.0, "log"), Range(1e-3, 10.0, "log")
    momentum = Range(0.5, 0.9)
    spaces = (
        ExpandedSpace(0, 4, {KEYS[0]: rate, KEYS[1]: momentum}),
        ExpandedSpace(4, 6, {KEYS[0]: wide, KEYS[1]: momentum}),
    )
    record = dataclasses.replace(study.record, spaces=spaces, space=dict(spaces[1].space))
    first = f"drew them from this search space: learning_rate {rate}; momentum {momentum}."
    second = f"--extend-space widened it to learning_rate {wide}; momentum {momentum}, and points 4"
    shown = html.unescape(page(Analysis(record)))
    assert f"{first} {second} to 5 are in the added part." in shown
    command = "lit-dps study --config study.yaml"
    commands = f"{command} --study.trials 4; then {command} --study.trials 6 --extend-space<"
    assert commands in shown
    more = html.unescape(page(Analysis(dataclasses.replace(record, trials=9))))
    assert f"{commands[:-1]}; then {command} --study.trials 9<" in more
    assert f"study.yaml; {command}<" in html.unescape(page(study))


def test_every_finished_trial_is_in_the_table_with_the_fewest_steps_first(study, text):
    head, *rows = Page(text).rows
    steps = [row[head.index("steps")] for row in rows]
    known = [int(s) for s in steps if s != "-"]
    assert len(rows) == len(study.trials)
    assert known == sorted(study.trials["steps"].dropna()) and set(steps[len(known) :]) <= {"-"}
    in_trials = text.split('class="sortable"')[1]
    assert in_trials.count('<tr class="best">') == sum(c.k_star is not None for c in study.cells)


def test_values_of_axes_are_not_rounded_in_the_table_of_trials():
    rate = {"model.learning_rate": 0.1, "model.momentum": 0.9}
    cells = {}
    for sparsity in (0.9995, 0.9999):
        for examples in (1234567, 2345678):
            cell = Cell(4, sparsity, (("data.train_examples", examples),))
            cells[cell] = [result(cell, 0, 1600, params=rate)]
    axes = {"data.train_examples": [1234567, 2345678]}
    head, *rows = Page(page(analysis_of(cells, axes=axes))).rows
    assert head[:2] == ["sparsity", "train examples"]
    shown = {tuple(row[:2]) for row in rows}
    assert shown == set(product(["0.9995", "0.9999"], ["1234567", "2345678"]))


@pytest.mark.pictures
def test_nothing_is_loaded_from_a_network(drawn):
    for tag, attributes in Page(drawn).tags:
        for name in ("src", "href", "action", "data", "srcset", "poster", "background"):
            assert attributes.get(name, "data:").startswith("data:"), (tag, attributes)
    assert not re.findall(r"https?:|@import|url\(|fetch\(|XMLHttpRequest|import\(", drawn)
    pictures = svgs(drawn)
    assert len(pictures) >= 3
    for picture in pictures:
        links = re.findall(r'href="([^"]*)"', picture)
        assert links and all(link.startswith("#") for link in links)
        addresses = set(re.findall(r"https?://[^\"]*", picture))
        assert all("www.w3.org" in address for address in addresses), addresses


@pytest.mark.pictures
def test_only_two_pictures_are_not_folded_and_each_can_be_saved(drawn):
    assert drawn.split("<details")[0].count("<img") == 2
    assert drawn.count("<img") == len(set(re.findall(r'<img src="[^"]+"', drawn))) >= 3
    for figure in re.findall(r"<figure>.*?</figure>", drawn):
        kinds = re.findall(r'data-kind="(\w+)"', figure)
        assert kinds == ["svg", "png"] and 'data-file="fake-' in figure
        assert len(re.findall(r'alt="Plot: \w[^"]+"', figure)) == 1


def test_it_can_be_read_by_a_screen_reader(text):
    parsed = Page(text)
    assert parsed.attributes("html") == [{"lang": "en"}]
    tags = [tag for tag, _ in parsed.tags]
    assert tags.count("h1") == 1 and tags.count("main") == 1
    assert all("alt" in image for image in parsed.attributes("img"))
    assert all(head.get("scope") == "col" for head in parsed.attributes("th"))


def luminance(colour):
    """The relative luminance of a colour, by WCAG 2."""
    digits = colour.lstrip("#")
    if len(digits) == 3:
        digits = "".join(2 * digit for digit in digits)
    linear = []
    for i in (0, 2, 4):
        share = int(digits[i : i + 2], 16) / 255
        linear.append(share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4)
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_each_text_has_enough_contrast_in_both_modes(text):
    light, dark = re.findall(r":root \{(.*?)\}", text, re.DOTALL)
    for block in (light, dark):
        colours = dict(re.findall(r"--(\w+): (#\w+);", block))
        for name in ("text", "muted", "accent", "warning"):
            for ground in ("page", "panel", "best"):
                values = sorted([luminance(colours[name]), luminance(colours[ground])])
                assert (values[1] + 0.05) / (values[0] + 0.05) >= 4.5, (name, ground)


@pytest.mark.long
@pytest.mark.pictures
def test_the_page_of_a_study_as_large_as_the_quickstart_is_small(tmp_path):
    cells = grid((8, 16, 32, 64, 128), (0.0, 0.9))
    curve = {"step": [], "val_error": [], "train_loss": []}
    for step in range(16, 4001, 16):
        curve["step"].append(step)
        curve["val_error"].append(0.1 + 1 / math.sqrt(step))
        curve["train_loss"].append(2.3 * math.exp(-step / 1000))
    results = {}
    for cell in cells:
        trials = law_results(cell, 16, 4e4, 60)
        results[cell] = [dataclasses.replace(each, curve=curve) for each in trials]
    publish(analysis_of(results, trials=16), tmp_path)
    text = (tmp_path / "report.html").read_text()
    assert text.count("<img") >= 5
    assert len(text.encode()) < 1_000_000


@pytest.mark.pictures
def test_a_picture_of_many_shapes_is_a_small_png():
    figure = Figure(figsize=(5, 3))
    ax = figure.add_subplot()
    module = ModuleType("dots")
    module.NAME = "dots"
    ax.plot([1, 2], [1.23456789, 1])
    few = picture_of(module, "dots", figure)
    assert (few.kind, few.width, few.height) == ("svg", 600, 360)
    assert max(map(len, re.findall(r' d="[^"]*\.(\d+) ', few.data.decode()))) <= 2
    ax.scatter(*np.random.default_rng(0).random((2, 20_000)), s=1)
    many = picture_of(module, "dots", figure)
    assert many.kind == "png" and len(many.data) < MAX_SVG_BYTES
    with PIL.Image.open(io.BytesIO(many.data)) as image:
        assert image.size == (750, 450)


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
    assert "No recommendation: no trial has ended yet." in text and "not finished" in text
    assert "<img" not in text and 'id="costs"' not in text


@pytest.mark.long
@pytest.mark.pictures
def test_it_is_the_same_each_time(study, drawn, tmp_path):
    _, files = publish(study, tmp_path)
    assert tmp_path / "report.html" in files
    assert (tmp_path / "report.html").read_text() == drawn


def test_a_study_that_was_used_is_made_from_the_same(study):
    unused, used = Goal(0.1, 16, 400), Goal(0.1, 16, 400)
    assert used.is_pointwise and not used.limits
    records = [dataclasses.replace(study.record, goal=goal) for goal in (unused, used)]
    assert source_of(records[0]) == source_of(records[1])


def test_a_page_of_another_frame_is_written_anew(study, monkeypatch):
    """The frame is part of what a study's files are made from, as is the code."""
    before, read = source_of(study.record), Path.read_bytes
    assert source_of(study.record) == before
    for changed in ("page.html", "page.js", "cost_table.py"):
        with monkeypatch.context() as patch:
            patch.setattr(
                Path,
                "read_bytes",
                lambda path, name=changed: read(path) + b" " * (path.name == name),
            )
            assert source_of(study.record) != before, changed
