"""What is written for a study: its tables and figures, and a line on each figure that it has no
data for."""

import csv
import hashlib
import json
import subprocess
import sys
from pathlib import Path

import matplotlib
import pytest

from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.tables import records
from lit_dps.core.atomic_write import not_written
from lit_dps.core.search_space import Range
from lit_dps.core.trial import Cell
from lit_dps.report import figures
from lit_dps.report.figures import STYLE, metaparameters
from lit_dps.report.figures.style import caption
from lit_dps.report.publish import STAMP, Written, listing, publish, write_all
from lit_dps.report.text import render
from tests.support.fake_study import SPACE, measured, result
from tests.support.texts import numbers_in
from tests.unit.report.test_figures import exact, read

TABLES = ["table.txt", "table.csv", "fits.csv", "critical.csv"]
NO_SMOOTHNESS = "no Lipschitz measurements (smoothness.interval is not set): no lipschitz figure"
RATES = ["rates.csv", "rates-prices.csv", "rates.png", "rates.pdf"]
MIDDLE = {key: box.at(0.5) for key, box in SPACE.items()}


def files_of(*names):
    return [f"{name}.{suffix}" for name in names for suffix in ("csv", "png", "pdf")]


@pytest.fixture(scope="module")
def two_sparsities():
    return Analysis(read(trials=6, batch_sizes=(4, 64), laws={0.0: (4e3, 60), 0.9: (8e3, 90)}))


@pytest.mark.pictures("scaling", "metaparameters", "logs", "rates")
def test_write_all_writes_everything_once(two_sparsities, tmp_path):
    study, folder = two_sparsities, tmp_path / "new" / "figures"
    paths, notes = write_all(study, folder)
    expected = [
        *TABLES,
        "answer.csv",
        *files_of("scaling", "time-to-goal", "metaparameters", "logs", "ratios"),
        "rates.csv",
        "rates-prices.csv",
        "rates.png",
        "rates.pdf",
    ]
    assert [path.name for path in paths] == expected
    assert sorted(path.name for path in folder.iterdir()) == sorted(expected)
    assert notes[0] == NO_SMOOTHNESS and all("rate" in note for note in notes[1:])
    by_name = {path.name: path for path in paths}
    for name in ("scaling", "logs", "rates"):
        assert by_name[f"{name}.png"].read_bytes().startswith(b"\x89PNG")
        assert by_name[f"{name}.pdf"].read_bytes().startswith(b"%PDF")
    assert by_name["table.txt"].read_text() == render(study)
    drawn = {
        "scaling.csv": figures.scaling.rows(study),
        "metaparameters.csv": figures.metaparameters.rows(study),
        "logs.csv": figures.logs.rows(study),
        "ratios.csv": figures.ratios.rows(study),
    }
    for name, rows in drawn.items():
        with by_name[name].open(newline="") as file:
            written = list(csv.DictReader(file))
        assert written == [
            {key: "" if x is None else str(x) for key, x in row.items()} for row in records(rows)
        ]
        assert written
    before = {path: path.read_bytes() for path in paths}
    write_all(study, folder)
    assert {path: path.read_bytes() for path in paths} == before


def cells(done):
    return {Cell(b, s): done(Cell(b, s)) for b in (8, 16) for s in (0.0, 0.9)}


@pytest.mark.parametrize(
    ("results", "drawn", "missing"),
    [
        (
            cells(lambda cell: []),
            [],
            [
                "no trial has met the goal yet: no scaling or logs figure",
                "no finished trial yet: no metaparameters figure",
                NO_SMOOTHNESS,
                "no batch size has a K* both at the smallest sparsity and above it: no ratios "
                "figure",
            ],
        ),
        (
            cells(lambda cell: [result(cell, 0, None, params=MIDDLE)]),
            ["metaparameters"],
            [
                "no trial has met the goal yet: no scaling or logs figure",
                NO_SMOOTHNESS,
                "no batch size has a K* both at the smallest sparsity and above it: no ratios "
                "figure",
            ],
        ),
        (
            {Cell(8, 0.5): [measured(result(Cell(8, 0.5), 0, 320, params=MIDDLE))]},
            ["metaparameters", "lipschitz", "logs"],
            ["one batch size only: no scaling figure", "one sparsity only: no ratios figure"],
        ),
        (
            cells(lambda cell: [result(cell, 0, 32, params=MIDDLE)] if cell.sparsity else []),
            ["scaling", "metaparameters", "rates", "rates-prices"],
            [
                NO_SMOOTHNESS,
                "K* of each cell is its first validation: no logs figure",
                "no batch size has a K* both at the smallest sparsity and above it: no ratios "
                "figure",
                "No trial met the goal at S = 0: no curve there.",
                "K* at the first validation, or of fewer than half of the trials, are upper bounds. "
                "They are drawn hollow, with an arrow, and not normalised.",
                "Effective rates eta / (1 - m) at S = 0.9 assume heavy-ball momentum.",
            ],
        ),
        (
            cells(
                lambda cell: [result(cell, 0, 32, params=MIDDLE)] if cell.batch_size == 8 else []
            ),
            ["metaparameters"],
            [
                "K* at one batch size only: no scaling figure",
                NO_SMOOTHNESS,
                "K* of each cell is its first validation: no logs figure",
                "no batch size has an exact K* both at the smallest sparsity and above it: no ratios "
                "figure",
            ],
        ),
    ],
    ids=["nothing", "all incomplete", "one cell", "no dense K*", "one batch size done"],
)
@pytest.mark.pictures
def test_an_unfinished_study_is_drawn_and_says_what_is_missing(results, drawn, missing, tmp_path):
    paths, notes = write_all(Analysis(read(results, trials=5)), tmp_path)
    assert notes == missing
    assert [path.name for path in paths[:4]] == TABLES
    assert (
        list(
            dict.fromkeys(
                path.stem.removesuffix("-mean") for path in paths[4:] if path.stem != "answer"
            )
        )
        == drawn
    )
    assert all(path.stat().st_size for path in paths)


def test_only_some_figures(two_sparsities, tmp_path):
    paths, notes = write_all(two_sparsities, tmp_path / "some", only=["lipschitz", "ratios"])
    assert [path.name for path in paths] == files_of("ratios")
    assert notes == [NO_SMOOTHNESS]
    paths, _ = write_all(two_sparsities, tmp_path / "none", only=["lipschitz"])
    assert paths == []
    assert not (tmp_path / "none").exists()


def test_figures_of_many_series_are_drawn_on_request(two_sparsities, tmp_path, monkeypatch):
    monkeypatch.setattr("lit_dps.report.figures.style.MOST_SERIES", 1)
    paths, notes = write_all(two_sparsities, tmp_path / "all")
    names = {path.name for path in paths}
    assert {"scaling.csv", "logs.csv", "time-to-goal.png"} <= names
    assert not names & {"scaling.png", "logs.png"}
    assert any(numbers_in(note)[:2] == [2, 1] for note in notes)
    paths, notes = write_all(two_sparsities, tmp_path / "one", ["scaling"])
    assert [path.name for path in paths] == files_of("scaling")


def test_figures_of_many_panels_are_drawn_on_request(two_sparsities, tmp_path, monkeypatch):
    monkeypatch.setattr("lit_dps.report.figures.metaparameters.MOST_CELLS", 3)
    monkeypatch.setattr("lit_dps.report.figures.rates.MOST_LINES", 1)
    paths, notes = write_all(two_sparsities, tmp_path / "all")
    names = {path.name for path in paths}
    assert {"metaparameters.csv", "rates.csv", "rates-prices.csv", "scaling.png"} <= names
    assert not names & {"metaparameters.png", "rates.png"}
    assert any(numbers_in(note)[:2] == [4, 3] for note in notes)
    paths, notes = write_all(two_sparsities, tmp_path / "one", ["metaparameters"])
    assert [path.name for path in paths] == files_of("metaparameters") and notes == []


@pytest.mark.pictures
def test_axes_of_a_written_figure_are_separate_with_the_same_limits(two_sparsities):
    figure = metaparameters.draw(
        two_sparsities.trials, two_sparsities, metaparameters.axes_of(two_sparsities.record)[0]
    )
    before = [(*ax.get_xlim(), *ax.get_ylim()) for ax in figure.axes]
    caption(figure, [two_sparsities])
    assert [(*ax.get_xlim(), *ax.get_ylim()) for ax in figure.axes] == before
    first = figure.axes[0]
    assert list(first.get_shared_x_axes().get_siblings(first)) == [first]


@pytest.mark.pictures
def test_a_figure_is_drawn_once_a_file_and_laid_out_before(two_sparsities, tmp_path, monkeypatch):
    drawn, places = [], []
    draw = matplotlib.figure.Figure.draw

    def count(self, renderer):
        drawn.append(type(renderer).__name__)
        draw(self, renderer)
        places.append(
            [self._supxlabel.get_position(), *(ax.get_position().bounds for ax in self.axes)]
        )

    monkeypatch.setattr(matplotlib.figure.Figure, "draw", count)
    _, notes = write_all(two_sparsities, tmp_path, only=["logs"])
    assert notes == []
    assert drawn == ["RendererAgg", "MixedModeRenderer"], "of png and pdf"
    assert places[0] == places[1]


def test_figures_of_the_paper_are_all_there():
    numbers = {
        figure.NAME: figure.PAPER
        for figure in (*figures.FIGURES, *figures.COMPARISONS)
        if figure.PAPER
    }
    assert numbers == {
        "scaling": "1, 7-11",
        "optimizers": "2",
        "metaparameters": "3, 5, 13-18",
        "lipschitz": "4",
        "logs": "6",
        "ratios": "12",
    }


def test_files_are_listed_by_what_they_show(golden):
    files = [
        Path("a/table.txt"),
        Path("a/table.csv"),
        Path("a/fits.csv"),
        Path("a/x-model.lr.png"),
        Path("b/fits.csv"),
    ]
    golden.check("figures/listing.txt", listing(files, ["one", "two"]))
    assert listing([], []).count("\n") == 1
    notes = listing([], ["Trials were stopped early, so curves lack their first part."], 40)
    assert max(map(len, notes.splitlines())) <= 40
    assert notes.split()[-3:] == ["their", "first", "part."]


@pytest.mark.pictures
def test_a_figure_that_fails_leaves_the_old_one(tmp_path, monkeypatch):
    study = Analysis(read(exact(), trials=1))
    write_all(study, tmp_path, only=["scaling"])
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}

    def fail(self, path, **kw):
        path.write_bytes(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", fail)
    _, notes = write_all(study, tmp_path, only=["scaling"])
    assert any("figure scaling" in note and "no space left" in note for note in notes)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.pictures
def test_ticks_get_the_style_too(tmp_path, monkeypatch):
    seen = []

    def look(self, path, **kw):
        path.write_bytes(b"")
        seen.append([matplotlib.rcParams[key] for key in ("xtick.labelsize", "pdf.fonttype")])

    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", look)
    write_all(Analysis(read(exact())), tmp_path, only=["scaling"])
    assert seen == [[STYLE["xtick.labelsize"], 42]] * 2
    assert matplotlib.rcParams["xtick.labelsize"] != STYLE["xtick.labelsize"]


def test_an_analysis_is_written_as_it_was_computed(tmp_path):
    record = read(trials=4, batch_sizes=(4, 16, 64))
    few = Analysis(record, replicates=5)
    write_all(few, tmp_path)
    assert (tmp_path / "table.txt").read_text() == render(few) != render(Analysis(record))


@pytest.mark.long
@pytest.mark.pictures
def test_drawing_leaves_global_state_alone(tmp_path):
    code = """
import sys
import matplotlib
before = matplotlib.rcParams.copy()  # dict() would look the backend up, and so import pyplot
sys.path.insert(0, sys.argv[1])
from tests.unit.report.test_figure_files import Analysis, exact, read, write_all
write_all(Analysis(read(exact())), sys.argv[2])
print("matplotlib.pyplot" in sys.modules, matplotlib.rcParams.copy() == before)
"""
    arguments = [sys.executable, "-c", code, str(Path(__file__).parents[3]), str(tmp_path)]
    assert (
        subprocess.run(arguments, capture_output=True, text=True, check=True).stdout
        == "False True\n"
    )


def test_each_pair_of_metaparameters_has_its_files(tmp_path):
    space = {f"model.{name}": Range(0.1, 1.0) for name in ("a", "b", "c")}
    params = dict.fromkeys(space, 0.5)
    record = read({Cell(8, 0.0): [result(Cell(8, 0.0), 0, 32, params=params)]}, space=space)
    paths, _ = write_all(Analysis(record), tmp_path, only=["metaparameters"])
    stems = ["metaparameters", "metaparameters-a-c", "metaparameters-b-c"]
    assert [path.name for path in paths] == [
        "metaparameters.csv",
        *(f"{s}.{kind}" for s in stems for kind in ("png", "pdf")),
    ]


def test_files_of_an_equal_study_are_left_and_others_made_anew(tmp_path):
    study = exact()
    text, files = publish(Analysis(read(study)), tmp_path)
    made = {path: path.stat().st_mtime_ns for path in files}
    assert publish(Analysis(read(study)), tmp_path) == (text, files)
    assert made == {path: path.stat().st_mtime_ns for path in files}, "nothing was drawn again"
    content = files[-1].read_bytes()
    files[-1].write_bytes(b"somebody's own")
    files[0].unlink()
    assert publish(Analysis(read(study)), tmp_path) == (text, files)
    assert files[-1].read_bytes() == content and files[0].is_file()
    more = {cell: results[:-1] for cell, results in study.items()}
    assert publish(Analysis(read(more)), tmp_path)[0] != text


def test_files_that_a_study_has_no_more_are_deleted_unless_the_user_changed_them(
    tmp_path, monkeypatch
):
    folder, other = tmp_path / "s", tmp_path / "other.png"
    folder.mkdir()
    other.write_text("outside")

    def write(names, notes=()):
        def write_goals(study, folder, figures=()):
            paths = [folder / name for name in names]
            for path in paths:
                path.write_text(" ".join(names))
            return Written(paths, list(notes))

        monkeypatch.setattr("lit_dps.report.publish.write_goals", write_goals)
        study = {cell: results[: len(names)] for cell, results in exact().items()}
        publish(Analysis(read(study)), folder)
        return {path.name for path in folder.iterdir()} - {STAMP}

    assert write(["a.png", "b.png", "c.png"]) == {"a.png", "b.png", "c.png"}
    (folder / "c.png").write_text("my own")
    (folder / "d.png").write_text("of figures --only")
    failed = not_written("figure a", ValueError("no"))
    assert write(["a.png"], [failed]) == {"a.png", "b.png", "c.png", "d.png"}
    stamp = json.loads((folder / STAMP).read_text())
    stamp["files"]["../other.png"] = hashlib.sha256(b"outside").hexdigest()
    (folder / STAMP).write_text(json.dumps(stamp))
    assert write(["a.png", "e.png"]) == {"a.png", "c.png", "d.png", "e.png"}
    assert other.read_text() == "outside"
