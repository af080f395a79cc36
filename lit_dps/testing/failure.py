"""ConformanceError: a plug-in does not do what lit_dps requires of it."""

from __future__ import annotations


class ConformanceError(AssertionError):
    """A plug-in fails a conformance test.

    Attributes:
        requirement: A short name of the requirement, such as "resumed".
        what: What the plug-in does.
        expected: What is expected of it.
        shown_by: The input that shows it.
    """

    def __init__(self, requirement: str, what: str, expected: str, shown_by: str):
        super().__init__(f"{what}; expected: {expected}; shown by: {shown_by}")
        self.requirement = requirement
        self.what = what
        self.expected = expected
        self.shown_by = shown_by


def require(requirement: str, is_right: bool, what: str, expected: str, shown_by: str) -> None:
    """Raise ConformanceError unless a requirement is met."""
    if not is_right:
        raise ConformanceError(requirement, what, expected, shown_by)
