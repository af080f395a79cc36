"""The docstring of each verb, which `lit-dps --help` lists without a slow import."""

from __future__ import annotations

import ast
from pathlib import Path


def docstring(verb: str) -> str:
    """Return the docstring of a verb's module, without an import of the module."""
    source = Path(__file__).with_name(f"{verb}.py").read_text(encoding="utf-8")
    return ast.get_docstring(ast.parse(source)) or ""


def summary(verb: str) -> str:
    """Return the first line of a verb's docstring, without the name of the verb."""
    line = docstring(verb).splitlines()[0]
    return line.removeprefix(f"{verb}: ")
