"""docs/reading.md has a paragraph on every figure that is drawn, and on none that is not."""

from __future__ import annotations

import re
from pathlib import Path

from lit_dps.report.figures.write import NAMES

PAGE = (Path(__file__).parents[3] / "docs" / "reading.md").read_text(encoding="utf-8")


def test_every_figure_has_its_paragraph():
    parts = dict(re.findall(r"^### ([\w-]+)\n\n(.+?)(?=\n#|\Z)", PAGE, re.MULTILINE | re.DOTALL))
    assert set(parts) == NAMES
    assert all(len(text) > 100 for text in parts.values())
