"""lit-dps masks: what pruning keeps of each layer, without training, and that it is what a study's
trials have."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
import yaml

from lit_dps.cli import main
from lit_dps.cli.masks import SPARSITIES, masks
from lit_dps.core import progress_line
from lit_dps.core.trial import Cell, Series, Trial
from tests.e2e.commands import FAST
from tests.support.errors import refusals_in
from tests.support.runs import train_one
from tests.unit.engines.test_engine import quiet  # noqa: F401
from tests.unit.study.test_grid import GOAL, PARAMS, WORKLOAD, setup


def test_masks_are_those_of_the_trials_of_a_study():
    found = list(
        masks(setup({"pruning.method": ["random", "snip"]}, batch_sizes=[16]), [0.5, 0.9], 2)
    )
    assert len(found) == 8
    for series, point, kept in found:
        method = dict(series.axes)["pruning.method"]
        result = train_one(
            Trial(Cell(16, series.sparsity), point, PARAMS),
            WORKLOAD,
            GOAL,
            pruning={"method": method},
        )
        assert kept == result.kept


def test_the_command_writes_tables_and_figures_and_stores_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for seconds in ("FIRST_SECONDS", "PART_SECONDS", "PIPE_SECONDS"):
        monkeypatch.setattr(progress_line, seconds, 0.0)
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(yaml.safe_load(FAST.read_text())))
    args = [
        "masks",
        "--config",
        "c.yaml",
        "--at",
        "[0.5, 0.999]",
        "--points",
        "1",
        "--output",
        "out",
    ]
    assert main([*args, "--study.grid", "{pruning.method: [magnitude, synflow]}"]) == 0
    text, progress = capsys.readouterr()
    lines = [line for line in progress.splitlines() if line.startswith("masks made: ")]
    assert lines == [f"masks made: {done} of 4" for done in range(4)]
    assert "synflow" in text and "out/collapse.{csv,png,pdf}" in text
    table = pd.read_csv("out/collapse.csv")
    assert len(table) == 4 and set(table["method"]) == {"magnitude", "synflow"}
    assert not list(tmp_path.glob("**/study.db"))
    assert main([*args[:4], "[1.5]"]) == 2 and refusals_in(capsys.readouterr().err) == [
        ("--at", "1.5")
    ]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--study.sparsities", "[0.5, 0.9]"], [0.5, 0.9]),
        (["--study.sparsities", "[0.5, 0.9]", "--at", "[0.7]"], [0.7]),
        ([], list(SPARSITIES)),
    ],
)
def test_the_sparsities_are_those_of_the_study_unless_others_are_given(
    tmp_path, monkeypatch, capsys, arguments, expected
):
    made = []

    def spy(setup, sparsities, points):
        made.extend(sparsities)
        series = Series(sparsities[0], (("pruning.method", "snip"),))
        return iter([(series, 0, {"w": (1, 2)})])

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("lit_dps.cli.masks.masks", spy)
    content = yaml.safe_load(FAST.read_text())
    content["study"].pop("sparsities", None)
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(content))
    assert main(["masks", "--config", "c.yaml", "--output", "out", *arguments]) == 0
    assert made == expected


@pytest.mark.parametrize(
    ("arguments", "refused"),
    [
        (["--study.sparsities", "[0]"], ("study.sparsities", "[0.0]")),
        (["--study.sparsities", "[1.5]"], ("study.sparsities", "1.5")),
        (["--study.sparsities", "[0.5]", "--at", "[0]"], ("--at", "[0.0]")),
    ],
)
def test_refused_sparsities_have_the_key_that_sets_them(
    tmp_path, monkeypatch, capsys, arguments, refused
):
    monkeypatch.chdir(tmp_path)
    assert main(["masks", "--config", str(FAST), *arguments]) == 2
    assert refusals_in(capsys.readouterr().err) == [refused]


def test_the_shipped_configuration_has_the_sparsities_of_its_page():
    path = Path(__file__).parents[2] / "configs" / "studies" / "masks.yaml"
    assert yaml.safe_load(path.read_text())["study"]["sparsities"] == list(SPARSITIES)
