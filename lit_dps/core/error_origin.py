"""Where an error of the user's code comes from: its text, its place, the error behind it."""

from __future__ import annotations

import os
import re
import sysconfig
import traceback
from importlib.util import find_spec
from pathlib import Path

import lit_dps
from lit_dps.core.errors import UserError

_FRAME = re.compile(r' *File "(.+)", line (\d+), in (.+)')


def find_user_error(error: BaseException | None) -> UserError | None:
    """Return the UserError that another error was raised from; None if there is none."""
    while error is not None and not isinstance(error, UserError):
        error = error.__cause__ or error.__context__
    return error


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text; the name of its class if it has no text."""
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__


def is_loader_worker_error(error: BaseException) -> bool:
    """Return True if a worker of a DataLoader raised the error.

    The text of the error then contains the traceback of the worker.
    """
    return "in DataLoader worker process" in str(error) and "Original Traceback" in str(error)


def error_text(error: BaseException) -> str:
    """Return the text of an error; of an error in a worker of a DataLoader, the original text."""
    text = str(error)
    if not is_loader_worker_error(error):
        return text
    lines = text.strip().splitlines()
    last_frame = 0
    for i, line in enumerate(lines):
        if line.startswith((" ", "Original Traceback")):
            last_frame = i
    original = " ".join(lines[last_frame + 1 :])
    return original.removeprefix(f"{type(error).__name__}: ")


def place_in_user_code(error: BaseException) -> str:
    """Return the last place of an error in the user's code, as " (file, line, in function)".

    Returns:
        "" if no frame is in the user's code.
    """
    libraries = tuple(f"{folder}{os.sep}" for folder in _library_folders())
    frames = [frame for frame in _frames_of(error) if not frame.filename.startswith(libraries)]
    if not frames:
        return ""
    # The user's call of another library says more than a line within that library.
    user_frames = [frame for frame in frames if not _is_installed(frame.filename)]
    last = (user_frames or frames)[-1]
    return f" ({Path(last.filename).name}, line {last.lineno}, in {last.name})"


def _library_folders() -> list[Path]:
    """Return the folders of the libraries whose frames are never the user's."""
    folders = [Path(lit_dps.__file__).parent]
    for name in ("lightning", "torch"):
        spec = find_spec(name)
        if spec is not None and spec.origin is not None:
            folders.append(Path(spec.origin).parent)
    return folders


def _frames_of(error: BaseException) -> list[traceback.FrameSummary]:
    """Return the frames of an error's traceback, then those of a worker of a DataLoader."""
    frames = list(traceback.extract_tb(error.__traceback__))
    if not is_loader_worker_error(error):
        return frames
    for line in str(error).splitlines():
        match = _FRAME.match(line)
        if match is not None:
            frames.append(traceback.FrameSummary(match[1], int(match[2]), match[3]))
    return frames


def _is_installed(file: str) -> bool:
    """Return True if a file belongs to the standard library or to an installed package."""
    site_packages = f"{os.sep}site-packages{os.sep}"
    return site_packages in file or file.startswith(sysconfig.get_path("stdlib"))
