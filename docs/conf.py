"""Sphinx configuration of the site that `make docs` builds. The pages are plain Markdown.

The source folder is the repository, not docs/, so that links to README.md, to configurations and to
code work as on GitHub. The table of contents is made from docs/index.md: its headings are the
captions, and its links are the pages below them.
"""

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
VERSION = re.search(
    r'__version__ = "(.+)"', (ROOT / "lit_dps" / "__init__.py").read_text(encoding="utf-8")
)

project, author, release = "lit_dps", "The lit_dps maintainers", VERSION[1]
copyright = f"2026, {author}"
extensions = ["myst_parser"]
root_doc = "docs/index"
include_patterns = [
    "*.md",
    "docs/**.md",
    "docs/**.ipynb",
    "benchmarks/results/*.md",
    "tests/data/README.md",
]
exclude_patterns = [
    ".*",
    "build",
    "dist",
    "lit_dps",
    "mlruns",
    "data",
]  # Sphinx need not search them
source_suffix = {".md": "markdown", ".ipynb": "markdown"}
suppress_warnings = [
    "toc.not_included"
]  # the table of contents has the pages of the index only; test_docs.py follows all links
myst_heading_anchors = 4  # links to #headings, by GitHub's rule
highlight_language = "none"

html_theme = (
    "furo"  # its fonts and scripts are files of the site, so a page loads nothing from the network
)
smartquotes = False  # quoted commands keep straight quotes

html_title = f"lit_dps {release}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_extra_path = ["site"]  # index.html, which leads to docs/index.html
html_copy_source = False
html_show_sphinx = False

LINK = re.compile(r"\]\(([^)\s#]+\.(?:md|ipynb))(?:#[^)\s]*)?\)")


def contents(app, docname: str, source: list[str]) -> None:
    """Append a hidden table of contents to the index: each heading with the pages below it."""
    if docname != root_doc:
        return
    text, seen = source[0], set()
    for part in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        caption, _, body = part.partition("\n")
        pages = [
            ("/docs/" + target if not target.startswith("../") else target[2:])
            for target in LINK.findall(body)
        ]
        pages = [page for page in dict.fromkeys(pages) if page not in seen]
        seen.update(pages)
        entries = "\n".join(page.rpartition(".")[0] for page in pages)
        source[0] += (
            f"\n\n```{{toctree}}\n:hidden:\n:caption: {caption.strip()}\n\n{entries}\n```\n"
        )


def cells(app, docname: str, source: list[str]) -> None:
    """Convert a notebook to Markdown: its cells with their stored outputs."""
    if not source[0].startswith("{"):
        return
    parts = []
    for cell in json.loads(source[0])["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
        for output in cell.get("outputs", ()):
            data = output.get("data", {"text/plain": output.get("text", "")})
            if "image/png" in data:
                parts.append(
                    f"![a figure](data:image/png;base64,{''.join(data['image/png']).replace(chr(10), '')})"
                )
            elif text := "".join(data["text/plain"]).rstrip():
                parts.append(f"```\n{text}\n```")
    source[0] = "\n\n".join(parts)


def setup(app) -> None:
    app.connect("source-read", contents)
    app.connect("source-read", cells)
