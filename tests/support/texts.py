"""What a text for users holds, independent of its wording."""

from __future__ import annotations

import re


def numbers_in(text: str) -> list[float]:
    """Return the numbers of a text in their order; digits within names and versions are none."""
    return [float(number) for number in re.findall(r"(?<![\w.=])\d+(?:\.\d+)?(?![\w.]\d)", text)]
