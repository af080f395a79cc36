"""The exit codes of `lit-dps`: one table for every verb."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit code of a command of `lit-dps`.

    Python itself ends with 1 after an error that this package does not expect; it prints a
    traceback. `ui` returns the exit code of MLflow. `replicate` returns the exit code of the first
    study that does not end with 0.

    Attributes:
        meaning: When a command ends with this code, in one sentence.
    """

    meaning: str

    def __new__(cls, code: int, meaning: str) -> ExitCode:
        member = int.__new__(cls, code)
        member._value_ = code
        member.meaning = meaning
        return member

    DONE = 0, "The command is done."
    FAILED = 1, "Trials failed, or doctor reports an error."
    REFUSED = (
        2,
        "A key, a file, the data or the storage cannot be used; one line says why.",
    )
    NO_RESULT = (
        3,
        "No trial of the study reached its goal, or advise has no recommendation.",
    )
    WAITING = 4, "Other processes train the remaining trials; the last writes the report."
    INTERRUPTED = 130, "Ctrl-C or SIGTERM interrupted the command; stored results are kept."


def exit_code_lines() -> list[str]:
    """Return the table of exit codes, a line each, as `lit-dps --help` shows it."""
    return [f"  {code.value:<4} {code.meaning}" for code in ExitCode]
