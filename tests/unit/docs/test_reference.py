"""docs/keys.md and docs/python.md are what the docstrings say today."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

import lit_dps
import lit_dps.cli as cli
from lit_dps.cli.config_file import SECTION_CLASSES
from tests.support.errors import raises_about

DOCS = Path(__file__).parents[3] / "docs"


@pytest.fixture(scope="module")
def reference():
    spec = importlib.util.spec_from_file_location("reference", DOCS / "reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", ["keys.md", "python.md"])
def test_a_page_is_what_the_docstrings_say(reference, page):
    assert reference.PAGES[page]() == (DOCS / page).read_text(encoding="utf-8"), (
        "run python docs/reference.py"
    )


def test_every_section_key_verb_and_public_name_is_there():
    keys, python = ((DOCS / page).read_text(encoding="utf-8") for page in ("keys.md", "python.md"))
    for section in SECTION_CLASSES:
        assert f"\n## {section}\n" in keys
    for key in (
        "study.trials",
        "goal.at_least",
        "pruning.method",
        "local.outer_nesterov",
        "storage.optuna",
    ):
        assert f"| `{key}` |" in keys
    for verb in cli.VERBS:
        assert f"\n### lit-dps {verb}\n" in keys
    for name in lit_dps._PUBLIC:
        assert f"\n## {name}\n" in python


def test_an_argument_without_a_word_is_told(reference):
    class Silent:
        """Says nothing of what it takes."""

        def __init__(self, factor: float = 1.0):
            self.factor = factor

    with raises_about(LookupError, "factor"):
        reference._table(Silent)
