"""docs/notebook.ipynb runs from top to bottom, and gives what it shows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.notebook import outputs

NOTEBOOK = Path(__file__).parents[3] / "docs" / "notebook.ipynb"


@pytest.mark.long
@pytest.mark.slow
def test_the_notebook_runs_and_gives_what_it_shows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    for cell, found in outputs(notebook):
        kinds = [output["output_type"] for output in cell["outputs"]]
        assert [output["output_type"] for output in found] == kinds, cell["source"]
        if "machine" not in cell["metadata"].get(
            "tags", ()
        ):  # training amplifies the rounding of another machine
            assert found == cell["outputs"]


def test_its_outputs_are_small():
    assert NOTEBOOK.stat().st_size < 60_000
