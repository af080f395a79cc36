"""No command lets a file in the current folder replace an installed module, or runs code that it
does not need."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lit_dps.cli import VERBS, append_current_folder, imports_user_code
from lit_dps.parallel import fork_server as processes

ROOT = Path(__file__).parents[3]
PLANTED = (
    "yaml",
    "optuna",
    "numpy",
    "random",
    "jsonargparse",
    "sqlalchemy",
    "mlflow",
    "torch",
    "lit_dps",
)


@pytest.fixture
def planted(tmp_path):
    """A folder with files that would replace modules, and leave a trace when they are imported."""
    for name in PLANTED:
        (tmp_path / f"{name}.py").write_text(
            "open('imported', 'w'); raise SystemExit(f'{__name__} was planted')\n"
        )
    return tmp_path


def command(folder: Path, *argv: str, **environment: str) -> subprocess.CompletedProcess:
    """Runs a command as the console script does, whose own folder comes first on sys.path."""
    script = folder / "bin" / "lit-dps"
    script.parent.mkdir()
    script.write_text("import sys\nfrom lit_dps.cli import main\nsys.exit(main())\n")
    known = {
        "PYTHONPATH": str(ROOT),
        "HOME": str(folder),
        "PATH": os.environ["PATH"],
        **environment,
    }
    return subprocess.run(
        [sys.executable, str(script), *argv],
        cwd=folder,
        env=known,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.parametrize(
    "argv",
    [
        ("configs",),
        pytest.param(("analyze",), marks=pytest.mark.long),
        ("merge", "x.db"),
        pytest.param(("ui",), marks=pytest.mark.long),
        pytest.param(("calibration",), marks=pytest.mark.long),  # imports for seconds
    ],
)
def test_a_planted_module_is_not_imported_where_no_class_is(planted, argv):
    done = command(planted, *argv)
    assert not (planted / "imported").exists(), done.stderr
    assert done.returncode == (0 if argv == ("configs",) else 2), done.stderr


@pytest.mark.parametrize("safe", ["", pytest.param("1", marks=pytest.mark.long)])
def test_a_class_path_is_found_and_a_planted_module_replaces_none(planted, safe):
    (planted / "mine.py").write_text("from lit_dps.module import ImageClassifier\n")
    (planted / "study.yaml").write_text(
        "model: {class_path: mine.ImageClassifier, init_args: {nothing: 1}}\n"
        "data: {class_path: lit_dps.data.Digits}\n"
    )
    done = command(planted, "study", "study.yaml", PYTHONSAFEPATH=safe)
    assert not (planted / "imported").exists(), done.stderr
    assert done.returncode == 2 and "nothing" in done.stderr


def test_only_verbs_that_import_classes_of_the_user_get_the_folder():
    assert {verb for verb in VERBS if imports_user_code([verb])} == {
        *("fit", "validate", "test", "study", "advise", "masks", "init")
    }
    assert imports_user_code(["figures", "--only=mine"]) and not imports_user_code(
        ["figures", "name"]
    )


def test_the_folder_comes_last_and_once(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["a", "b"])
    append_current_folder()
    append_current_folder()
    assert sys.path == ["a", "b", str(tmp_path)]


def where(sent) -> None:
    sent.send((sys.path, os.environ.get("PYTHONSAFEPATH")))


@pytest.mark.skipif(processes.METHOD != "forkserver", reason="processes are spawned here")
def test_the_processes_of_a_study_search_in_the_same_order(planted):
    (planted / "start.py").write_text(
        "import os, sys\n"
        f"sys.path[:] = [*sys.path[1:], {str(planted)!r}]\n"
        "from lit_dps.parallel import fork_server as processes\n"
        "from tests.unit.cli.test_import_path import where\n"
        "if __name__ == '__main__':\n"
        "    received, sent = processes.context().Pipe(duplex=False)\n"
        "    processes.start(where, 'worker', (sent,))\n"
        "    path, safe = received.recv()\n"
        "    assert set(path[path.index(os.getcwd()) :]) == {os.getcwd()}, path\n"
        "    assert safe is None\n"
    )
    known = {"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"]}
    done = subprocess.run(
        [sys.executable, "start.py"],
        cwd=planted,
        env=known,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert not (planted / "imported").exists()
