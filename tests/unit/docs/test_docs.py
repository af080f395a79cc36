"""Links between pages lead somewhere, every page is found from the index, and their configurations
have known keys."""

import re
from pathlib import Path

import pytest
import yaml

from lit_dps.cli.key_checks import CLASSES, sections

ROOT = Path(__file__).parents[3]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
LINK = re.compile(r"\]\(([^)\s]+)\)")


def links(page: Path) -> list[str]:
    """The targets of a page's links and images, outside of code blocks."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    return LINK.findall(text)


def slug(heading: str) -> str:
    """What a heading is linked by."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in links(page):
        if re.match(r"(https?|mailto):", target):
            continue
        path, _, anchor = target.partition("#")
        there = page if not path else (page.parent / path).resolve()
        assert there.exists(), f"{page.relative_to(ROOT)} links to {target}, which is not there"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", there.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in map(slug, headings), (
                f"{page.relative_to(ROOT)} links to {target}: no such heading"
            )


def test_every_page_is_found_from_the_index():
    reached, left = set(), [ROOT / "docs" / "index.md"]
    while left:
        page = left.pop()
        if page in reached or page.suffix != ".md":
            continue
        reached.add(page)
        left += [
            (page.parent / target.partition("#")[0]).resolve()
            for target in links(page)
            if "://" not in target
        ]
    missing = [
        str(page.relative_to(ROOT)) for page in PAGES if page not in reached and page.parent != ROOT
    ]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_configurations_in_the_pages_have_keys_that_are_there(page):
    known = sections()
    for block in re.findall(
        r"^```yaml\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    ):
        for section, content in yaml.safe_load(block).items():
            assert section in known, f"{section} in {block}"
            if known[section] and isinstance(content, dict) and not CLASSES & content.keys():
                assert content.keys() <= known[section], f"{section} in {block}"
