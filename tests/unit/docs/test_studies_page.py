"""docs/studies.md describes every figure that can be drawn, and no other one."""

from __future__ import annotations

import re
from pathlib import Path

from lit_dps.report.figures.write import NAMES

PAGE = Path(__file__).parents[3] / "docs" / "studies.md"


def test_every_figure_is_described():
    page = PAGE.read_text(encoding="utf-8")
    section = page.partition("\n## Figures\n")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| `([\w-]+)` \| (.+) \|$", section, re.MULTILINE))
    assert set(rows) == NAMES
    assert all(len(description) > 50 for description in rows.values())
