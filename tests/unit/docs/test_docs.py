"""Links of the pages have targets, the index links to every page, and configurations have known keys."""

import re
from collections import Counter
from pathlib import Path

import pytest
import yaml

from lit_dps.cli.key_checks import CLASSES, sections

ROOT = Path(__file__).parents[3]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
LINK = re.compile(r"\]\(([^)\s]+)\)")


def links(page: Path) -> list[str]:
    """Return the targets of the links and images of a page, without code blocks."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    return LINK.findall(text)


def slug(heading: str) -> str:
    """Return the anchor of a heading, by GitHub's rule."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page. A second heading "study" has the anchor "study-1"."""
    counts: Counter[str] = Counter()
    found = set()
    for heading in re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE):
        name = slug(heading)
        found.add(f"{name}-{counts[name]}" if counts[name] else name)
        counts[name] += 1
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_link_targets_exist(page):
    for target in links(page):
        if re.match(r"(https?|mailto):", target):
            continue
        path, _, anchor = target.partition("#")
        there = page if not path else (page.parent / path).resolve()
        assert there.exists(), f"{page.relative_to(ROOT)} links to {target}, which is not there"
        if anchor:
            assert anchor in anchors(there), (
                f"{page.relative_to(ROOT)} links to {target}: no such heading"
            )


def test_index_links_to_every_page():
    index = ROOT / "docs" / "index.md"
    linked = set()
    for target in links(index):
        linked.add((index.parent / target.partition("#")[0]).resolve())
    pages = {page for page in PAGES if page.parent == index.parent} - {index}
    assert pages <= linked, sorted(str(page.relative_to(ROOT)) for page in pages - linked)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_configurations_have_known_keys(page):
    known = sections()
    for block in re.findall(
        r"^```yaml\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    ):
        for section, content in yaml.safe_load(block).items():
            assert section in known, f"{section} in {block}"
            if known[section] and isinstance(content, dict) and not CLASSES & content.keys():
                assert content.keys() <= known[section], f"{section} in {block}"
