"""The site of the pages is built without a warning, and its pages load nothing from the network."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

build = pytest.importorskip("sphinx.cmd.build")
pytest.importorskip("myst_parser")
pytest.importorskip("furo")
ROOT = Path(__file__).parents[3]
LOADED = re.compile(
    r"<(?:script|img|iframe|source)[^>]*\ssrc=\"(https?:)?//|<link[^>]*rel=\"stylesheet\"[^>]*//|@import"
)


def test_site_is_complete_and_loads_nothing_from_the_network(tmp_path):
    site = tmp_path / "site"
    given = [
        "--fail-on-warning",
        "--quiet",
        "-c",
        str(ROOT / "docs"),
        "-d",
        str(tmp_path / "trees"),
        str(ROOT),
    ]
    assert build.main([*given, str(site)]) == 0
    pages = [page.relative_to(ROOT) for page in ROOT.glob("docs/**/*.md")]
    assert all((site / page).with_suffix(".html").exists() for page in pages)
    assert 'href="keys.html"' in (site / "docs/index.html").read_text(encoding="utf-8"), (
        "the index is the table of contents"
    )
    for page in site.glob("**/*.html"):
        assert not LOADED.search(page.read_text(encoding="utf-8")), page
