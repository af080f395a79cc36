"""The files of docs/extending.md, as they stand there."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "extending.md").read_text()
MAX_LINES = 40  # of a recipe


def files_of_page() -> dict[str, str]:
    """Return the text of each file of the page, by its name."""
    return dict(re.findall(r"```(?:python|yaml)\n# (\S+)\n(.*?)```", PAGE, re.DOTALL))


def write_files(folder: Path) -> None:
    for name, text in files_of_page().items():
        (folder / name).write_text(text)


def import_recipe(name: str, folder: Path, patch: pytest.MonkeyPatch) -> ModuleType:
    """Import a module of the page from a folder, as a user's script in this folder does."""
    write_files(folder)
    patch.syspath_prepend(folder)
    patch.delitem(sys.modules, name, raising=False)
    return importlib.import_module(name)
