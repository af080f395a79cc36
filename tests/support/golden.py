"""Golden files: whole outputs, kept under tests/golden and compared as text.

A change of wording is one command: `python -m pytest --update-golden`, then `git diff
tests/golden`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "golden"
OPTION = "--update-golden"


class Golden:
    """Compares texts with golden files, or writes these.

    Args:
        update: Whether to write the files; set by `pytest --update-golden`.
    """

    def __init__(self, update: bool):
        self.update = update

    def check(self, name: str, text: str) -> None:
        """Assert that a text equals the golden file of a name, such as "cli/help-study.txt".

        Values that differ between runs or machines (times, folders, versions) are the caller's to
        replace.
        """
        file = FOLDER / name
        if self.update:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
            return
        assert file.exists(), f"no golden file {file}: write it with pytest {OPTION}"
        assert text == file.read_text(encoding="utf-8"), f"{file}; pytest {OPTION} rewrites it"


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    """Compares whole outputs with the files of tests/golden."""
    return Golden(request.config.getoption(OPTION))
