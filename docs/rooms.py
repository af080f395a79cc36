"""Draws docs/rooms.svg, the rooms of the package and who imports whom: `python docs/rooms.py`.

The imports are read from the source, so that the picture stays true; a test compares it.
"""

from __future__ import annotations

import ast
from html import escape
from pathlib import Path

DOCS = Path(__file__).parent
PACKAGE = DOCS.parent / "lit_dps"
PICTURE = DOCS / "rooms.svg"
NOT_DRAWN = {"advising", "api"}  # an alias for class paths; the entry for notebooks

# Where a room is drawn, in columns: training on the left, results on the right. Its row is its level.
COLUMNS = {
    **{"data": 0, "optim": 1, "parallel": 2, "models": 0, "module": 1, "pruning": 2},
    **{"training": 1, "readings": 1, "engines": 1, "testing": 0},
    **{"analysis": 4, "storage": 5, "report": 4, "tracking": 5, "replication": 3},
    **{"core": 2.5, "study": 2.5, "forecast": 2, "advice": 3, "cli": 2.5},
}
BOX_WIDTH, BOX_HEIGHT, GAP_X, GAP_Y = 130, 40, 20, 40  # pixels
WIDTH = 6 * (BOX_WIDTH + GAP_X) + GAP_X


def rooms() -> list[str]:
    """Return the names of all rooms: the folders of the package, and module.py."""
    folders = [path.parent.name for path in PACKAGE.glob("*/__init__.py")]
    return sorted({*folders, "module"} - NOT_DRAWN)


def files_of(room: str) -> list[Path]:
    """Return the source files of a room."""
    file = PACKAGE / f"{room}.py"
    if file.exists():
        return [file]
    return sorted((PACKAGE / room).rglob("*.py"))


def imported_rooms(room: str) -> set[str]:
    """Return the other rooms that a room imports, also within functions."""
    result = set()
    for file in files_of(room):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module == "lit_dps":
                names = [f"lit_dps.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module]
            for name in names:
                first, _, rest = name.partition(".")
                if first == "lit_dps" and rest:
                    result.add(rest.partition(".")[0])
    return (result & set(rooms())) - {room}


def closure(room: str, graph: dict[str, set[str]]) -> set[str]:
    """Return all rooms that a room imports, directly or through others."""
    result: set[str] = set()
    for other in graph[room]:
        result |= {other} | closure(other, graph)
    return result


def direct_edges(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """Return the imports that follow from no others (the transitive reduction of the graph)."""
    result = {}
    for room, imported in graph.items():
        indirect: set[str] = set()
        for other in imported:
            indirect |= closure(other, graph)
        result[room] = imported - indirect
    return result


def level(room: str, graph: dict[str, set[str]]) -> int:
    """Return the length of the longest chain of imports below a room."""
    return max((1 + level(other, graph) for other in graph[room]), default=0)


def summary(room: str) -> str:
    """Return what is in a room: the first sentence of its docstring, without its name."""
    file = PACKAGE / f"{room}.py"
    if not file.exists():
        file = PACKAGE / room / "__init__.py"
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    first = text.split("\n\n")[0].replace("\n", " ")
    first = first.partition(": ")[2] or first
    return first.partition(". ")[0].rstrip(".")


def positions(graph: dict[str, set[str]]) -> dict[str, tuple[float, float]]:
    """Return the upper left corner of each box; the lowest level is at the bottom."""
    levels = {room: level(room, graph) for room in graph}
    result = {}
    for room in graph:
        x = GAP_X + COLUMNS[room] * (BOX_WIDTH + GAP_X)
        y = 10 + (max(levels.values()) - levels[room]) * (BOX_HEIGHT + GAP_Y)
        result[room] = (x, y)
    return result


def picture() -> str:
    """Return the picture as SVG."""
    graph = {room: imported_rooms(room) for room in rooms()}
    corners = positions(graph)
    height = max(y for _, y in corners.values()) + BOX_HEIGHT + 10
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="13">',
        "<title>The rooms of lit_dps. A line leads from a room down to one that it imports; "
        "imports that follow from others are not drawn.</title>",
        f'<rect width="{WIDTH}" height="{height:g}" fill="#ffffff"/>',
    ]
    for room, imported in sorted(direct_edges(graph).items()):
        for other in sorted(imported):
            x1, y1 = corners[room][0] + BOX_WIDTH / 2, corners[room][1] + BOX_HEIGHT
            x2, y2 = corners[other][0] + BOX_WIDTH / 2, corners[other][1]
            middle = (y1 + y2) / 2
            lines.append(
                f'<path d="M{x1:g} {y1:g} C{x1:g} {middle:g} {x2:g} {middle:g} {x2:g} {y2:g}" '
                'fill="none" stroke="#8a93a3"/>'
            )
    for room, (x, y) in sorted(corners.items()):
        lines += [
            f'<rect x="{x:g}" y="{y:g}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="5" '
            'fill="#eef2f9" stroke="#4c6a9c"/>',
            f'<text x="{x + BOX_WIDTH / 2:g}" y="{y + 27:g}" text-anchor="middle">'
            f"<title>{escape(summary(room))}</title>{escape(room)}</text>",
        ]
    return "\n".join([*lines, "</svg>"]) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
    print("written: docs/rooms.svg")
