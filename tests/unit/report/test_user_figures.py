"""Figures of users: in the files of a study, in its page and in `Study.plot`."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from lit_dps.analysis.analysis import Analysis
from lit_dps.core.trial import Cell
from lit_dps.report.figures import of_others
from lit_dps.report.figures.page_pictures import PIXELS_PER_INCH
from lit_dps.report.figures.write import NAMES as NAMES_OF_FIGURES
from lit_dps.report.figures.write import TABLES
from lit_dps.report.notebook import Study
from lit_dps.report.publish import publish
from lit_dps.study.sources import source_hashes
from tests.support.errors import refuses
from tests.support.fake_study import analysis_of, law_results
from tests.support.recipes import files_of_page

NAMES = ["success.csv", "success.png", "success.pdf"]


@pytest.fixture(scope="module")
def study():
    cells = {Cell(b): law_results(Cell(b), 3, 4e4, 60) for b in (4, 64)}
    return analysis_of(cells, trials=3)


@pytest.fixture
def figure(tmp_path, monkeypatch):
    """The file of the page's figure, which can be imported."""
    folder = tmp_path / "code"
    folder.mkdir()
    file = folder / "my_figure.py"
    file.write_text(files_of_page()["my_figure.py"])
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # an edit may come within a second
    yield file
    sys.modules.pop("my_figure", None)


def widths(folder: Path) -> list[float]:
    """The width in inches of the user's figure in the page of a study."""
    text = (folder / "report.html").read_text()
    inches = []
    for figure in re.findall(r"<figure>.*?</figure>", text):
        if "-success" in figure:
            (width,) = re.findall(r'width="(\d+)"', figure)
            inches.append(int(width) / PIXELS_PER_INCH)
    return inches


@pytest.mark.pictures("success")
def test_a_figure_is_written_shown_in_the_page_and_plotted(study, figure, tmp_path):
    folder = tmp_path / "files"
    publish(study, folder)
    assert widths(folder) == []
    _, files = publish(study, folder, figures=["my_figure"])
    assert {folder / name for name in NAMES} <= {*files}
    assert widths(folder) == [4]
    axes = Study(study.record).plot("my_figure").axes[0]
    assert axes.get_ylabel() == "Share of the trials that reach the goal"
    # A later command, such as analyze, keeps the figure. It need not find the module.
    page = folder / "report.html"
    before = page.stat().st_mtime_ns
    sys.modules.pop("my_figure")
    sys.path.remove(str(figure.parent))
    assert {folder / name for name in NAMES} <= {*publish(study, folder)[1]}
    assert page.stat().st_mtime_ns == before


@pytest.mark.pictures("success")
def test_an_edited_figure_is_drawn_again_and_a_failing_one_costs_nothing(study, figure, tmp_path):
    folder = tmp_path / "files"
    publish(study, folder, figures=["my_figure"])
    sys.modules.pop("my_figure")
    figure.write_text(figure.read_text().replace("figsize=(4, 3)", "figsize=(2, 2)"))
    publish(study, folder, figures=["my_figure"])
    assert widths(folder) == [2]
    sys.modules.pop("my_figure")
    figure.write_text(figure.read_text() + "\ndef rows(*studies):\n    raise ValueError('none')\n")
    text, _ = publish(study, folder, figures=["my_figure"])
    assert widths(folder) == [] and "figure success" in text and "ValueError" in text
    text, _ = publish(study, folder, figures=["no_such_figure"])
    assert "figure no_such_figure" in text


def test_a_module_without_a_figure_is_refused(study, figure):
    with refuses("name", "no_such_figure"):
        Study(study.record).plot("no_such_figure")
    with refuses("name", "tests.support.errors"):
        Study(study.record).plot("tests.support.errors")


def test_the_axis_of_an_earlier_version_is_refused_without_by_default(study, figure):
    figure.write_text(figure.read_text() + "\nAXIS = 'local.steps'\n")
    with refuses("study.figures", "my_figure") as error:
        of_others("my_figure", "study.figures")
    assert "local.steps" in str(error.value) and "\n" not in str(error.value)
    sys.modules.pop("my_figure")
    figure.write_text(figure.read_text() + "\ndef by_default(*studies):\n    return False\n")
    assert of_others("my_figure").NAME == "success"


@pytest.mark.parametrize("name", ["scaling", "table", "rates-prices", "metaparameters-a-b"])
def test_a_figure_named_as_a_file_of_the_package_is_refused(study, figure, tmp_path, name):
    figure.write_text(figure.read_text().replace('"success"', f'"{name}"'))
    with refuses("study.figures", "my_figure"):
        of_others("my_figure", "study.figures")
    for file in publish(study, tmp_path / "files")[1]:
        is_pair = file.stem.startswith("metaparameters-")
        assert file.suffix != ".csv" or file.stem in NAMES_OF_FIGURES | TABLES or is_pair


def test_a_figure_is_no_code_of_the_trials(study, figure):
    Study(study.record).plot("my_figure")
    assert "my_figure.py" in source_hashes({})
    assert "my_figure.py" not in source_hashes({"study": {"figures": ["my_figure"]}})
    assert isinstance(study, Analysis)
