"""The progress of a study in a notebook: one line that is updated in place."""

from __future__ import annotations

import io
import sys
from typing import Any

SECONDS_BETWEEN_UPDATES = 1.0


class NotebookLine(io.StringIO):
    """A stream whose last written line replaces the line before, in the output of a cell.

    Args:
        display: `IPython.display.display`.
    """

    def __init__(self, display: Any):
        super().__init__()
        self._display = display
        self._handle: Any = None

    def write(self, text: str) -> int:
        """Show a line in place of the line before."""
        shown = {"text/plain": text.rstrip()}
        if self._handle is None:
            self._handle = self._display(shown, raw=True, display_id=True)
        else:
            self._handle.update(shown, raw=True)
        return len(text)


def notebook_line() -> NotebookLine | None:
    """Return a line in the output of the running cell; None outside of a notebook."""
    # IPython is no dependency. A notebook has imported it.
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if shell is None or not hasattr(shell, "kernel"):
        return None
    return NotebookLine(sys.modules["IPython.display"].display)
