"""Runs the cells of a notebook without Jupyter: `python -m tests.support.notebook
docs/notebook.ipynb` writes what they gave.

A cell's outputs are what it printed, and its last expression, unless a semicolon ends it: text, or
a figure as a PNG.
"""

from __future__ import annotations

import ast
import base64
import io
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import chdir, redirect_stdout
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure


def outputs(notebook: dict[str, Any]) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Each cell of code with its outputs, as a notebook stores them; runs in the working
    directory."""
    names: dict[str, Any] = {"__name__": "notebook"}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            yield cell, _run("".join(cell["source"]), names)


def _run(source: str, names: dict[str, Any]) -> list[dict[str, Any]]:
    tree, value, printed = ast.parse(source), None, io.StringIO()
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    with redirect_stdout(printed):
        exec(compile(tree, "cell", "exec"), names)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
    found: list[dict[str, Any]] = []
    if text := printed.getvalue():
        found.append(
            {"output_type": "stream", "name": "stdout", "text": text.splitlines(keepends=True)}
        )
    if value is not None and not source.rstrip().endswith(";"):  # as in Jupyter
        data = (
            {"text/plain": ["<Figure>"], "image/png": _png(value)}
            if isinstance(value, Figure)
            else None
        )
        data = data or {"text/plain": str(value).splitlines(keepends=True)}
        found.append({"output_type": "display_data", "metadata": {}, "data": data})
    return found


def _png(figure: Figure) -> str:
    with io.BytesIO() as file:
        figure.savefig(file, format="png", dpi=90, metadata={"Software": None})
        return base64.b64encode(file.getvalue()).decode()


def main(path: Path) -> None:
    notebook = json.loads(path.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        for number, (cell, found) in enumerate(outputs(notebook), 1):
            cell["execution_count"], cell["outputs"] = number, found
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
