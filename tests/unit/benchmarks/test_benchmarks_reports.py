"""The benchmarks' command and its reports."""

from __future__ import annotations

import json
from contextlib import contextmanager

import pytest

from benchmarks import SECTIONS, summary
from benchmarks.__main__ import main
from benchmarks.report import read
from tests.e2e.commands import ROOT


def test_unknown_sections_are_refused(capsys):
    with pytest.raises(SystemExit):
        main(["speed"])
    assert "no section speed; there are startup, protocol, step" in capsys.readouterr().err


BRIEF = ["protocol", "step", "checks", "fused"]  # the sections that fill no database


@contextmanager
def no_pool(workers, threads, keep=True):
    """In place of `benchmarks.pool.pool`: this process, which has imported everything."""
    yield lambda function, arguments: [function(*each) for each in arguments]


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    "sections", [BRIEF, pytest.param(list(SECTIONS), marks=pytest.mark.long)], ids=["brief", "all"]
)
def test_a_quick_run_writes_its_sections(tmp_path, monkeypatch, sections):
    few = ["--repeats", "1", "--trials", "3", "--max-steps", "32"] if sections == BRIEF else []
    if few:
        monkeypatch.setattr("benchmarks.protocol.pool", no_pool)
    assert main([*sections, "--quick", *few, "--output", str(tmp_path)]) == 0
    [file] = tmp_path.glob("*-quick.json")
    stored = json.loads(file.read_text())
    assert list(stored["sections"]) == sections
    assert file.with_suffix(".md").read_text().count(f"python -m benchmarks {sections[0]}") == len(
        sections
    )
    assert all(
        both["same"]
        for cell in stored["sections"]["protocol"]["numbers"]["cells"]
        for both in cell["both"]
    )


def test_the_table_of_the_docs_is_that_of_the_newest_report():
    reports = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
    # A report of one section, such as of a GPU, has no table of the docs.
    newest = [file for file in reports if "protocol" in read(file).sections][-1]
    path = str(newest.with_suffix(".md").relative_to(ROOT))
    page = (ROOT / "docs" / "scaling.md").read_text()
    assert summary.put(summary.summary(read(newest), path), page) == page


def test_a_newer_table_takes_the_place_of_the_last_one():
    readme = f"before\n{summary.BEGIN}{summary.END}\nafter\n"
    once = summary.put("old\n", readme)
    assert summary.put("new\n", once) == once.replace("old", "new")
    assert once.startswith("before\n") and once.endswith(f"old\n\n{summary.END}\nafter\n")
