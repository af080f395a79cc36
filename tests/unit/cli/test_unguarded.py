"""A script whose call would be run again by each process that it starts is known before one is
started."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lit_dps.cli import main

ROOT = Path(__file__).parents[3]
CALL = "ask()"
SCRIPTS = {
    "unconditional": (CALL, True),
    "in a function that is called so": (f"def go():\n    {CALL}\n\ngo()", True),
    "in a with": (f"import contextlib\nwith contextlib.nullcontext():\n    {CALL}", True),
    "guarded": (f"if __name__ == '__main__':\n    {CALL}", False),
    "guarded in a try": (
        f"try:\n    if __name__ == '__main__':\n        {CALL}\nfinally:\n    pass",
        False,
    ),
    "below another condition": (
        f"import multiprocessing\nif not multiprocessing.parent_process():\n    {CALL}",
        False,
    ),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_call_below_no_condition_is_unguarded(tmp_path, name):
    text, expected = SCRIPTS[name]
    (tmp_path / "mine.py").write_text(
        "from lit_dps.parallel.fork_server import unguarded\ndef ask(): print(unguarded())\n"
    )
    (tmp_path / "script.py").write_text(f"from mine import ask\n{text}\n")
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert (done.stdout, done.stderr) == (f"{expected}\n", "")


def test_what_is_no_script_is_not():
    code = "from lit_dps.parallel.fork_server import unguarded; print(unguarded())"
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert ran.stdout == "False\n"


def test_a_module_that_ends_the_process_is_refused_with_its_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "ends_at_import.py").write_text("import sys\nsys.exit(0)\n")
    (tmp_path / "a.yaml").write_text("model: ends_at_import.M\ndata: lit_dps.data.Digits\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["study", "a.yaml"]) == 2
    assert "ends_at_import.py, line 2" in capsys.readouterr().err
    assert not (tmp_path / "mlruns").exists()
