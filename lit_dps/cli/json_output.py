"""`--json`: one document alone on stdout, and all other text on stderr."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from typing import Any

from lit_dps.report.document import to_json


@contextmanager
def stdout_on_stderr() -> Iterator[None]:
    """Send all that is printed to stderr, also by other processes and by libraries in C."""
    sys.stdout.flush()
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)


def print_document(document: Mapping[str, Any]) -> None:
    """Print a document on stdout as strict JSON."""
    print(to_json(document), flush=True)
