"""`--json`: one document alone on stdout, and all other text on stderr."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from functools import wraps
from typing import Any, NamedTuple

from lit_dps.cli.command_line import CommandLine
from lit_dps.report.document import to_json


class Outcome(NamedTuple):
    """How a verb ended.

    Attributes:
        code: The exit code.
        document: Returns the document of `--json`; None if there is none.
    """

    code: int
    document: Callable[[], Mapping[str, Any] | None]


def with_document(run: Callable[[CommandLine], Outcome]) -> Callable[[CommandLine], int]:
    """Return a verb that returns its exit code; with `--json`, its document alone is on stdout."""

    @wraps(run)
    def main(command: CommandLine) -> int:
        if not command.has("json"):
            return run(command).code
        with stdout_on_stderr():
            outcome = run(command)
            document = outcome.document()
        if document is not None:
            print_document(document)
        return outcome.code

    return main


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
