"""docs/rooms.svg is drawn from the imports of today."""

from __future__ import annotations

import importlib.util
from pathlib import Path

DOCS = Path(__file__).parents[3] / "docs"


def test_the_picture_of_the_rooms_is_up_to_date():
    spec = importlib.util.spec_from_file_location("rooms", DOCS / "rooms.py")
    rooms = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(rooms)
    assert set(rooms.COLUMNS) == set(rooms.rooms())
    assert rooms.picture() == rooms.PICTURE.read_text(encoding="utf-8"), "run python docs/rooms.py"
