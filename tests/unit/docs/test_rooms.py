"""The picture of the rooms is up to date, and the modules that docs/architecture.md names exist."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

DOCS = Path(__file__).parents[3] / "docs"


def test_the_picture_of_the_rooms_is_up_to_date():
    spec = importlib.util.spec_from_file_location("rooms", DOCS / "rooms.py")
    rooms = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(rooms)
    assert set(rooms.COLUMNS) == set(rooms.rooms())
    assert rooms.picture() == rooms.PICTURE.read_text(encoding="utf-8"), "run python docs/rooms.py"


def test_modules_to_open_for_a_question_exist():
    page = (DOCS / "architecture.md").read_text(encoding="utf-8")
    _, _, rest = page.partition("## Files to open for a question")
    section, _, _ = rest.partition("\n## ")
    files_of_questions = re.findall(r"^\| .+? \| (.+) \|$", section, re.MULTILINE)
    names = re.findall(r"`([a-z_0-9/]+)`", " ".join(files_of_questions))
    assert len(names) > 80
    room = ""
    missing = []
    for name in names:
        if "/" in name:
            room = name.partition("/")[0]
            path = f"{name}.py"
        else:
            path = f"{room}/{name}.py"
        if not (DOCS.parent / "lit_dps" / path).exists():
            missing.append(path)
    assert not missing
