"""Pieces of a Markdown page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from lit_dps.replication.parts import Image


def table(rows: Sequence[Mapping[str, str]]) -> str:
    """Return rows, at least one and all with the same columns, as a table."""
    heads = list(rows[0])
    lines = [_table_line(heads), _table_line(["---"] * len(heads))]
    lines += [_table_line(row.values()) for row in rows]
    return "\n".join(lines) + "\n"


def _table_line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(map(escaped, cells))} |"


def escaped(text: str) -> str:
    """Return a text in which * and | have no meaning to Markdown; code stays code."""
    if text.startswith("`"):
        return text
    return text.replace("|", "\\|").replace("*", "\\*")


def code_block(text: str) -> str:
    """Return a text as a block of code."""
    return f"```\n{text.rstrip()}\n```\n"


def figures(images: Sequence[Image]) -> str:
    """Return images, each with its caption below."""
    blocks = []
    for image in images:
        blocks.append(f"![{image.caption}]({image.path})\n\n*{escaped(image.caption)}*\n")
    return "\n".join(blocks)
