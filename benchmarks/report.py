"""The report: what each section found, on which machine, by which command; as markdown and as
JSON."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.numbers import Sample

INTRODUCTION = (
    "Speeds are ratios to a baseline measured in the same run, in turns with it: the median over "
    "the repeats and, in "
    "brackets, the smallest and the largest. Seconds stand beside them."
)


@dataclasses.dataclass(frozen=True)
class Section:
    """What one section found.

    Attributes:
        name: Name on the command line.
        title: Heading.
        text: The numbers as markdown.
        numbers: The numbers as plain JSON.
        command: The command that measured them.
        commit: The git commit they were measured at.
        begun: When, in UTC, to the second.
        seconds: How long that took.
        load: The machine's load average before.
    """

    name: str
    title: str
    text: str
    numbers: Any
    command: str
    commit: str
    begun: str
    seconds: float
    load: str


@dataclasses.dataclass(frozen=True)
class Report:
    """Sections of one day and machine.

    Attributes:
        date: YYYY-MM-DD.
        machine: As `benchmarks.machine.machine`.
        versions: As `benchmarks.machine.versions`.
        sections: By name, in the order of the report.
    """

    date: str
    machine: Mapping[str, str]
    versions: Mapping[str, str]
    sections: Mapping[str, Section]

    def markdown(self) -> str:
        """The whole report."""
        lines = [f"# Benchmarks of {self.date}", "", INTRODUCTION, ""]
        lines += [f"- {key}: {value}" for key, value in self.machine.items()]
        lines += [
            "- versions: "
            f"{', '.join(f'{name} {version}' for name, version in self.versions.items())}"
        ]
        for section in self.sections.values():
            lines += ["", f"## {section.title}", "", section.text, "", _source(section)]
        return "\n".join(lines) + "\n"

    def write(self, stem: Path, order: Sequence[str]) -> None:
        """Writes STEM.md and STEM.json. Sections of an earlier run of the same day stay, where
        machine and versions do.

        A part of the sections can so be measured again without losing hours of the others.
        """
        before = read(stem.with_suffix(".json"))
        sections = self.sections
        if before and (before.machine, before.versions) == (self.machine, self.versions):
            sections = {**before.sections, **sections}
        whole = dataclasses.replace(
            self, sections={name: sections[name] for name in order if name in sections}
        )
        stem.parent.mkdir(parents=True, exist_ok=True)
        stem.with_suffix(".json").write_text(json.dumps(dataclasses.asdict(whole), indent=1) + "\n")
        stem.with_suffix(".md").write_text(whole.markdown())


def _source(section: Section) -> str:
    return (
        f"`{section.command}`, {section.begun} UTC, {section.seconds:.0f} s, commit "
        f"{section.commit}, load average "
        f"before {section.load}"
    )


def read(path: Path) -> Report | None:
    """The report of a JSON file; None where there is none."""
    if not path.exists():
        return None
    stored = json.loads(path.read_text())
    sections = {name: Section(**section) for name, section in stored["sections"].items()}
    return Report(**{**stored, "sections": sections})


def plain(found: Any) -> Any:
    """Numbers as plain JSON: dataclasses as objects, samples with median and spread, what is not
    finite as text."""
    if isinstance(found, Sample):
        return {
            "median": found.median,
            "low": found.low,
            "high": found.high,
            "values": list(found.values),
        }
    if dataclasses.is_dataclass(found):
        return {
            field.name: plain(getattr(found, field.name)) for field in dataclasses.fields(found)
        }
    if isinstance(found, Mapping):
        return {str(key): plain(value) for key, value in found.items()}
    if isinstance(found, (list, tuple)):
        return [plain(value) for value in found]
    if isinstance(found, float) and not math.isfinite(found):
        return str(found)
    return found
