"""Files of an analysis are replaced in one go, or a single line says why not."""

from __future__ import annotations

import errno

import pytest

from lit_dps.core.atomic_write import check_folder, replacing
from lit_dps.core.errors import StorageError
from tests.support.errors import refuses


def test_a_file_and_its_folder_appear_at_the_end(tmp_path):
    path = tmp_path / "a" / "b" / "table.txt"
    with replacing(path) as temporary:
        temporary.write_text("new")
        assert not path.exists()
    assert path.read_text() == "new"
    assert list(path.parent.iterdir()) == [path]


def test_a_full_disk_leaves_the_old_file_and_says_so(tmp_path):
    path = tmp_path / "table.txt"
    path.write_text("old")
    with (
        refuses(str(path), "No space left on device", error=StorageError),
        replacing(path) as temporary,
    ):
        temporary.write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_in_the_place_of_the_folder(tmp_path):
    (tmp_path / "figures").touch()
    with (
        refuses(str(tmp_path / "figures" / "table.txt"), error=StorageError),
        replacing(tmp_path / "figures" / "table.txt"),
    ):
        pytest.fail("there is no folder to write to")


def test_a_folder_below_a_file_is_refused(tmp_path):
    (tmp_path / "f").write_text("")
    for folder in (tmp_path / "f", tmp_path / "f" / "below"):
        with refuses("--to", str(folder)):
            check_folder("--to", folder)
    check_folder("--to", tmp_path / "new" / "below")
    assert not (tmp_path / "new").exists()
