"""The values of `study.engine`, and the former ones, which keep their meaning."""

from __future__ import annotations

import pytest

from lit_dps.core import aliases
from lit_dps.core.aliases import present_engine
from lit_dps.core.config import StudyConfig
from lit_dps.core.search_space import Range
from lit_dps.storage.format_1 import convert_config
from tests.support.errors import refuses

SPACE = {"model.learning_rate": Range(1e-3, 1.0)}


@pytest.fixture(autouse=True)
def _warns_again():
    aliases.warn_of_former_name.cache_clear()
    aliases.warn_of_idle_key.cache_clear()


@pytest.mark.parametrize("engine", ["auto", "single", "stacked", "lightning"])
def test_present_names_are_taken_without_a_warning(engine, capsys):
    assert StudyConfig(space=SPACE, engine=engine).engine == engine
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("former", "present"),
    [
        ({"engine": "fused"}, "stacked"),
        ({"lean": False}, "lightning"),
        ({"engine": "auto", "lean": False}, "lightning"),
        ({"engine": "lightning", "lean": True}, "single"),
        ({"engine": "lightning", "lean": False}, "lightning"),
        ({"engine": "auto", "lean": True}, "auto"),
    ],
    ids=str,
)
def test_former_names_keep_their_meaning_with_one_line(former, present, capsys):
    for _ in range(2):
        study = StudyConfig(space=SPACE, **former)
        assert (study.engine, study.lean) == (present, None)
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("engine", "lean", "present"),
    [
        ("stacked", True, None),
        ("single", True, None),
        ("auto", True, None),
        ("lightning", True, "study.engine single"),
        ("single", False, "study.engine lightning"),
    ],
)
def test_the_warning_names_the_engine_that_lean_sets_and_no_other(engine, lean, present, capsys):
    StudyConfig(space=SPACE, engine=engine, lean=lean)
    warning = capsys.readouterr().err
    assert f"study.lean {str(lean).lower()}" in warning
    assert ("study.engine" in warning) == (present is not None)
    assert present is None or present in warning


def test_stacks_without_the_fast_loop_are_refused():
    with refuses("study.lean", False):
        StudyConfig(space=SPACE, engine="stacked", lean=False)


@pytest.mark.parametrize("engine", ["auto", "lightning", "fused", "sparse"])
def test_stored_configurations_are_read_with_present_names(engine):
    stored = {"study": {"engine": engine, "lean": True, "trials": 3}, "model": {"a": 1}}
    present = {"study": {"engine": present_engine(engine, True), "trials": 3}, "model": {"a": 1}}
    assert convert_config(stored) == present
