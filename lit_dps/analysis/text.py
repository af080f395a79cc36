"""Numbers and rows as text for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Row = dict[str, object]  # of a table that is written as CSV, by column


def significant(x: float | None) -> str:
    """A number to 3 significant digits, trailing zeros kept: 1.00, 0.540, 123; "-" for None."""
    return "-" if x is None else f"{x:#.3g}".rstrip(".")


def times(x: float | None) -> str:
    """A ratio: x1.67; "-" for None."""
    return "-" if x is None else f"x{significant(x)}"


def k_star_text(row: Row) -> str:
    """K* of a row with the columns k_star and floor: 112, "<= 16" where it is an upper bound, "-" for None."""
    bound = "<= " if row["floor"] else ""
    return "-" if row["k_star"] is None else f"{bound}{row['k_star']}"


def aligned(rows: Sequence[Mapping[str, str]], words: bool = False) -> list[str]:
    """Rows, all with the same columns, as lines below their header, right-aligned.

    Args:
        rows: At least one.
        words: Whether the last column holds words, which start where it starts.
    """
    table = [list(rows[0]), *(list(row.values()) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    numbers = len(widths) - words
    return [
        "  ".join(x.rjust(w) if i < numbers else x for i, (x, w) in enumerate(zip(line, widths, strict=True)))
        for line in table
    ]
