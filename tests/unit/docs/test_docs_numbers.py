"""Numbers and lists in the pages are those of the recorded tables and of the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lit_dps.core.trial_config import PruningConfig
from lit_dps.pruning import PRUNERS

ROOT = Path(__file__).parents[3]


def text(name: str) -> str:
    """A page, its line breaks as blanks."""
    return " ".join((ROOT / name).read_text(encoding="utf-8").split())


@pytest.mark.parametrize("batch_size", ["16", "128", "1,024"])
def test_savings_of_the_readme_are_those_of_the_benchmark(batch_size):
    low, high = re.search(
        rf"([\d.]+) to ([\d.]+) times (?:as long )?at B = {batch_size}\b", text("README.md")
    ).groups()
    plain = batch_size.replace(",", "")
    rows = [
        line
        for line in (ROOT / "docs/scaling.md").read_text().splitlines()
        if f"B = {plain}, " in line
    ]
    ranges = [
        pair
        for line in rows
        if "protocol" in line
        for pair in re.findall(r"x([\d.]+) to x([\d.]+)", line)
    ]
    assert len(ranges) == 2
    assert float(low) == pytest.approx(min(float(a) for a, _ in ranges), rel=0.02)
    assert float(high) == pytest.approx(max(float(b) for _, b in ranges), rel=0.01)


def test_the_keys_name_every_pruning_method():
    row = next(
        line
        for line in (ROOT / "docs/keys.md").read_text().splitlines()
        if line.startswith("| `pruning.method`")
    )
    for name in PRUNERS:
        assert f'"{name}"' in row and f'"{name}"' in PruningConfig.__doc__
