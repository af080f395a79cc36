"""An axis of a stored study is extended by values that can be read back, and by no others."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lit_dps.core.config import StudyConfig
from lit_dps.core.goal import Goal
from lit_dps.core.search_space import Choices
from lit_dps.core.trial import Cell
from lit_dps.storage.header import check_unchanged, declare
from lit_dps.storage.merge import merge
from lit_dps.storage.read import open_elsewhere, read_study
from tests.support.errors import refuses
from tests.support.fake_study import result, write_study

AXIS = "model.flag"
SPACE = {"model.learning_rate": {"low": 1e-3, "high": 1.0, "scale": "log"}}


@pytest.fixture
def url(tmp_path):
    return f"sqlite:///{tmp_path}/study.db"


def config(values: list) -> StudyConfig:
    return StudyConfig(
        name="s",
        batch_sizes=[8],
        sparsities=[0.0],
        trials=2,
        space=SPACE,
        grid={AXIS: values},
    )


def declare_axis(url: str, values: list) -> str:
    """Write or extend the header of a study with these values of its axis; return its uid."""
    return declare(url, config(values), "w", Goal(0.1), {"a": 1}, {}).uid


@pytest.mark.parametrize(
    ("stored", "new"),
    [
        ([64, 128], ["auto"]),
        (["bf16-mixed"], [32]),
        ([False, True], ["flip"]),
        ([0, 1], [False, True]),
        ([False], [0.5]),
    ],
)
def test_values_of_another_kind_are_refused_before_anything_is_written(url, stored, new):
    declare_axis(url, stored)
    for extend in (
        lambda: check_unchanged(url, "s", {"a": 1}, config(new)),
        lambda: declare_axis(url, new),
    ):
        with refuses(f"study.grid.{AXIS}", [*stored, *new]):
            extend()
    other = f"{url}.other"
    declare_axis(other, new)
    with open_elsewhere(other, url) as opened, refuses(f"study.grid.{AXIS}", [*stored, *new]):
        merge(url, [opened])
    assert read_study(url, "s").axes == {AXIS: tuple(stored)}


def test_values_of_the_same_kind_extend_an_axis(url):
    declare_axis(url, [0, 2])
    declare_axis(url, [0.5])
    assert read_study(url, "s").axes == {AXIS: (0, 0.5, 2)}


# ---- Characters that no terminal shows ----

HIDDEN = "a\u200cb"  # with a zero-width non-joiner


def test_values_with_invisible_characters_are_refused():
    with refuses(f"study.grid.{AXIS}", HIDDEN):
        config([HIDDEN, "c"]).check()
    space = {**SPACE, "model.network": {"choices": ["c", "c\x1b"]}}
    with refuses("study.space.model.network.choices", "c\x1b"):
        replace(config(["c"]), space=space).check()
    config(["größer µ", "日本"]).check()


def test_trials_of_stored_values_with_invisible_characters_are_read(tmp_path):
    cell = Cell(8, 0.0, ((AXIS, HIDDEN),))
    stored = [result(cell, 0, 16, params={"model.network": HIDDEN})]
    space = {"model.network": Choices([HIDDEN, "c"])}
    url = f"sqlite:///{tmp_path}/study.db"
    write_study(url, {cell: stored}, space=space, axes={AXIS: [HIDDEN]})
    record = read_study(url, "fake")
    (shown,) = record.cells
    assert shown.axes == ((AXIS, r"a\u200cb"),)
    (read,) = record.results[shown]
    assert read.steps == 16
    assert record.space["model.network"].contains(read.trial.params["model.network"])
