"""The verb replicate: which studies it runs, how it ends, and what it writes."""

import lzma
import os
import signal
import subprocess
import sys
import time

import optuna
import pandas as pd
import PIL.Image
import pytest
import yaml

import lit_dps
from lit_dps.cli import main, replicate
from lit_dps.core.goal import Goal
from lit_dps.core.trial import Cell
from lit_dps.storage.read import read_study
from lit_dps.storage.schema import IDENTITY
from tests.support.errors import error_line, refusals_in, refuses
from tests.support.fake_study import law_results, law_study, write_study

CONFIG = {
    "data": {"class_path": "lit_dps.data.MNIST"},
    "model": {
        "init_args": {"optimizer": "sgd", "network": {"class_path": "lit_dps.models.SimpleCNN"}}
    },
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with the configurations a.yaml and b.yaml of the studies "one: a" and "two"."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").mkdir()
    for file, name in (("b", "two"), ("a", "one: a")):
        text = yaml.safe_dump({"study": {"name": name}})
        (tmp_path / "configs" / f"{file}.yaml").write_text(text)
    return tmp_path


def stored(folder, *names, **header):
    (folder / "mlruns").mkdir(exist_ok=True)
    storage = optuna.storages.RDBStorage(f"sqlite:///{folder}/mlruns/study.db")
    for name in names:
        of = {
            "laws": {0.0: (4e4, 60), 0.9: (8e4, 120)},
            "batch_sizes": (4, 64),
            "trials": 6,
            "config": CONFIG,
            **header,
        }
        law_study(storage, name, **of)


def verb(*args):
    return main(["replicate", "--configs", "configs", *args])


def command(words: str) -> str:
    """Return a command as the pages show it."""
    return f"`lit-dps {words}`"


def test_a_study_that_was_extended_says_by_which_options(folder):
    stored(folder, "one: a")
    for study, said in [
        ({"batch_sizes": [4], "trials": 6}, "a.yaml --study.batch_sizes '[4, 64]'"),
        ({"batch_sizes": [4, 64], "trials": 5}, "a.yaml --study.trials 6"),
        ({"batch_sizes": [2, 4, 64], "trials": 9}, "a.yaml"),
        (
            {"batch_sizes": [4, 64], "trials": 6, "sparsities": [0.0]},
            "a.yaml --study.sparsities '[0.0, 0.9]'",
        ),
    ]:
        text = yaml.safe_dump({"study": {"name": "one: a", "sparsities": [0.0, 0.9], **study}})
        (folder / "configs" / "a.yaml").write_text(text)
        assert verb("--report_only", "true") == 0
        text = (folder / "docs" / "replication-appendix.md").read_text()
        assert command(f"study --config configs/{said}") in text


def test_the_report_alone_is_written_from_storage(folder, capsys):
    stored(folder, "one: a", "two")
    assert verb("--report_only", "true") == 0
    written = [line.rpartition(" ")[2] for line in capsys.readouterr().out.splitlines()]
    assert written == ["docs/replication.md", "docs/replication-appendix.md"]
    page = (folder / "docs" / "replication-appendix.md").read_text()
    assert command("replicate --configs configs --report_only true") in page
    titles = [line for line in page.splitlines() if line.startswith("## Study")]
    assert titles == [f"## Study {name}" for name in ("one: a", "two")]
    assert command("study --config configs/a.yaml") in page
    shown = [
        line.partition("](")[2].rstrip(")") for line in page.splitlines() if line.startswith("![")
    ]
    assert "replication/one__a-scaling.png" in shown
    assert "replication/MNIST_SimpleCNN_goal_error_0.1-ratios.png" in shown
    beside = folder / "docs" / "replication"
    images = {f"replication/{path.name}" for path in beside.glob("*.png")}
    assert images == {*shown}
    numbers = {path.name for path in beside.glob("*.csv")}
    assert numbers == {"claims.csv", "cells.csv"}
    cells = pd.read_csv(beside / "cells.csv")
    stored_cells = lit_dps.load("two", storage="mlruns/study.db").cells
    assert list(cells[cells["study"] == "two"]["k_star"]) == list(stored_cells["k_star"])
    claims = pd.read_csv(beside / "claims.csv")
    is_row = (claims["claim"] == "diminishing-returns") & (claims["study"] == "two")
    (row,) = claims[is_row & (claims["series"] == "S=0")].to_dict("records")
    dense = stored_cells[stored_cells["sparsity"] == 0]
    examples = (dense["batch_size"] * dense["k_star"]).tolist()
    assert row["value"] == pytest.approx(examples[-1] / examples[0], rel=1e-4)
    for path in beside.glob("*.png"):
        with PIL.Image.open(path) as picture:
            assert picture.mode == "P", "256 colours take a third of the space"


def compared(folder):
    """The studies in the rows of the figure of ratios, by what they have in common."""
    figures = (folder / "mlruns" / "figures").glob("compare_*/ratios.csv")
    return {
        file.parent.name: {line.split(",")[0] for line in file.open()} - {"study"}
        for file in figures
    }


@pytest.mark.long
def test_searches_for_the_same_goal_are_compared_and_best_points_of_others_are_not(folder):
    stored(folder, "one: a")
    stored(folder, "two", config={**CONFIG, "study": {"best_of": "one: a"}})
    assert verb("--report_only", "true") == 0
    assert compared(folder) == {"compare_MNIST_SimpleCNN_goal_error_0.1": {"one: a"}}


@pytest.mark.parametrize("larger", ["one: a", pytest.param("two", marks=pytest.mark.long)])
def test_of_two_searches_of_a_workload_for_a_goal_the_larger_is_compared(folder, larger):
    for name in ("one: a", "two"):
        stored(folder, name, trials=3 if name == larger else 2)
    assert verb("--report_only", "true") == 0
    assert compared(folder) == {"compare_MNIST_SimpleCNN_goal_error_0.1": {larger}}


def test_a_figure_of_ratios_names_only_the_studies_that_have_a_ratio(folder):
    stored(folder, "one: a")
    stored(folder, "two", laws={0.0: (4e4, 60)}, workload="dense")
    assert verb("--report_only", "true") == 0
    assert compared(folder) == {"compare_MNIST_SimpleCNN_goal_error_0.1": {"one: a"}}
    page = (folder / "docs" / "replication.md").read_text()
    assert "The figure shows `one: a`." in page.partition("## Figure 12")[2]
    assert "The figure shows `one: a`, `two`." in page.partition("## Figure 2\n")[2]


@pytest.mark.long
def test_searches_for_different_goals_are_apart(folder):
    stored(folder, "one: a")
    stored(folder, "two", goal=Goal(0.02, 16, 40_000))
    assert verb("--report_only", "true") == 0
    workload = "compare_MNIST_SimpleCNN_goal_error"
    assert compared(folder) == {f"{workload}_0.1": {"one: a"}, f"{workload}_0.02": {"two"}}


def test_a_study_that_is_not_there_is_told_and_left_out(folder, capsys):
    stored(folder, "two")
    assert verb("--report_only", "true", "--output", "else/where") == 0
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert "'one: a'" in said[0] and "sqlite:///mlruns/study.db" in said[0]
    assert "else/where/replication/studies" in said[0], "where stored trials are looked for"
    assert "use --full true --report_only true" in said[0], "--full true alone trains for days"
    page = (folder / "else" / "where" / "replication-appendix.md").read_text()
    assert f"## Study {'two'}" in page.splitlines()
    assert "one: a" not in page


def test_without_any_study_there_is_nothing_to_report(folder, capsys):
    assert verb("--report_only", "true") == 2
    missing, refusal = capsys.readouterr().err.splitlines()
    assert "'one: a', 'two'" in missing and "docs/replication/studies" in missing
    assert "no study of the replication" in refusal
    assert not (folder / "docs").exists()


@pytest.mark.parametrize("text", ["study: {}", "[1, 2", "- a", "study: [name]"])
def test_a_file_without_a_study_is_refused(folder, text):
    (folder / "configs" / "c.yaml").write_text(text)
    with refuses("configs", str(folder / "configs" / "c.yaml")):
        replicate.studies_in(folder / "configs")


def test_a_folder_without_configurations_is_refused(folder, capsys):
    assert main(["replicate", "--configs", "nowhere"]) == 2
    assert refusals_in(capsys.readouterr().err) == [("configs", "'nowhere'")]


def test_studies_run_in_order_until_one_fails(folder, monkeypatch):
    write = "import sys; open('ran.txt', 'a').write(' '.join(sys.argv[1:]) + '\\n'); "
    monkeypatch.setattr(replicate, "_CHILD", write + "sys.exit(7 * ('b.yaml' in sys.argv[3]))")
    assert verb("--storage.folder", "runs") == 7
    assert (folder / "ran.txt").read_text().splitlines() == [
        f"study --config configs/{file} --storage.folder=runs" for file in ("a.yaml", "b.yaml")
    ]
    assert not (folder / "docs").exists()


def test_studies_run_and_then_the_page_is_written(folder, monkeypatch):
    stored(folder, "one: a", "two")
    monkeypatch.setattr(replicate, "_CHILD", "import sys; open('ran.txt', 'a').write(sys.argv[3])")
    assert verb() == 0
    assert (folder / "ran.txt").read_text() == "configs/a.yamlconfigs/b.yaml"
    assert (folder / "docs" / "replication.md").exists()


def test_the_child_is_our_own_command_line(capfd):
    assert replicate._run(["--version"]) == 0
    assert capfd.readouterr().out.strip() == main_version()
    assert replicate._run(["no-such-verb"]) == 2
    assert "no-such-verb" in error_line(capfd.readouterr().err)


def main_version():
    from lit_dps import __version__

    return __version__


CHILD = """
import os, signal, sys, time
def end(signum, frame):
    open("got.txt", "a").write(f"{signum} ")
    time.sleep(0.3)
    sys.exit(130)
signal.signal(signal.SIGINT, end)
signal.signal(signal.SIGTERM, end)
open("started.txt", "w").write(str(os.getpid()))
time.sleep(60)
"""


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_what_ends_it_is_handed_on_once_and_waited_for(folder, sent):
    code = f"""
from lit_dps.cli import main
from lit_dps.cli import replicate
import sys
replicate._CHILD = {CHILD!r}
sys.exit(main(["replicate", "--configs", "configs"]))
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    process = subprocess.Popen(
        [sys.executable, "-c", code], start_new_session=True, env=environment
    )
    try:
        end = time.monotonic() + 60
        while not (folder / "started.txt").exists() or not (folder / "started.txt").read_text():
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.05)
        os.killpg(process.pid, sent)  # as a terminal sends Ctrl-C: to its process group
        assert process.wait(120) == 130
    finally:
        process.kill()
    assert (folder / "got.txt").read_text() == f"{sent.value} "
    assert not (folder / "docs").exists()


def test_a_child_that_a_signal_ends(folder, monkeypatch):
    monkeypatch.setattr(
        replicate, "_CHILD", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert verb() == 137


def test_the_full_form_goes_on_from_the_trials_in_the_repository(folder, capsys):
    """Studies of the folder `full` below, from a compressed database beside the page, with nothing
    stored before."""
    (folder / "configs" / "full").mkdir()
    (folder / "configs" / "full" / "c.yaml").write_text(
        yaml.safe_dump({"study": {"name": "three"}})
    )
    stored(folder, "three")
    optuna.load_study(
        study_name="three", storage=f"sqlite:///{folder}/mlruns/study.db"
    ).set_user_attr(IDENTITY, {"a": 1})
    shards = folder / "docs" / "replication" / "studies"
    shards.mkdir(parents=True)
    database = folder / "mlruns" / "study.db"
    with lzma.open(shards / "three.db.xz", "wb") as packed:
        packed.write(database.read_bytes())
    database.unlink()
    for _ in range(2):  # a second time there is nothing new
        assert verb("--full", "true", "--report_only", "true") == 0
        page = (folder / "docs" / "replication-appendix.md").read_text()
        assert f"## Study {'three'}" in page.splitlines()
    assert "`three`" in (folder / "docs" / "replication.md").read_text()
    assert len(read_study(f"sqlite:///{database}", "three").results[Cell(4, 0.0)]) == 6


def test_a_subset_is_no_study_and_no_study_has_its_name(folder, capsys):
    """The study "two" has 6 trials at 7 dense batch sizes, and at 3 of them at S = 0.9."""
    cells = {}
    for size in (1, 2, 4, 8, 16, 32, 64):
        for sparsity in (0.0, 0.9):
            cell = Cell(size, sparsity)
            cells[cell] = law_results(cell, 6, 4e4, 60)
            if sparsity and size not in (4, 16, 64):
                cells[cell] = []
    (folder / "mlruns").mkdir()
    url = f"sqlite:///{folder}/mlruns/study.db"
    write_study(url, cells, "two", trials=6, config=CONFIG)
    (folder / "configs" / "a.yaml").unlink()
    assert verb("--report_only", "true") == 0
    text = (folder / "docs" / "replication.md").read_text()
    assert "The evidence is 1 study with 60 trials" in text
    assert "`two-sparse` at " in text
    (folder / "configs" / "c.yaml").write_text(yaml.safe_dump({"study": {"name": "two-sparse"}}))
    capsys.readouterr()
    assert verb("--report_only", "true") == 2
    refusals = refusals_in(capsys.readouterr().err)
    assert refusals == [("study.name", "'two-sparse'")]
