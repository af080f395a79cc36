"""Advice: an answer with its evidence, as text, as a table, and as a document for machines.

`Advice.to_dict` is what `--json` prints. `lit_dps.report.document` documents its fields.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import pandas as pd

from lit_dps.advice.answer import HOUR, Answer
from lit_dps.advice.branch_law import Branched
from lit_dps.advice.next_probe import NextRun
from lit_dps.advice.text import MARKS, is_same_row, render, width_at, wrapped
from lit_dps.analysis.intervals import Interval, estimate
from lit_dps.analysis.law import Law
from lit_dps.analysis.observations import AT_LEAST, AT_MOST
from lit_dps.analysis.tables import aligned, records, significant
from lit_dps.core.batch_schedule import CONSTANT_BATCH
from lit_dps.core.exit_codes import ExitCode
from lit_dps.report.document import (
    ANSWERED,
    NO_RESULT,
    CellEntry,
    Document,
    LawEntry,
    law_entry,
    limits,
    limits_of,
    to_json,
)

BOUNDS = {0: "exact", AT_LEAST: "at least", AT_MOST: "at most"}
NO_TIMES = "No recommendation: runs without step times tell steps, but not what is fastest."
UNCERTAIN = ("steps", "hours", "device_hours", "cost")  # columns of the table with limits


@dataclass(frozen=True)
class Advice:
    """Which batch size to run, on how many devices, for how long.

    Attributes:
        name: The name of the study or of the table of runs.
        source: "runs" for runs that existed, "measured" for runs of the command.
        goal: The goal as text; None if it is unknown.
        law: Steps to the goal against batch size.
        answer: Times and costs; None without step times.
        steps: Steps by batch size, one row each (`Law.predict`).
        best_rates: The best learning rate that was measured, by batch size.
        next_run: The run to do next; None if unknown.
        notes: Notes on the answer, one or more sentences each.
        full_text: The text of the command; None if the other fields determine the text.
    """

    name: str
    source: str
    goal: str | None
    law: Law | Branched
    answer: Answer | None
    steps: pd.DataFrame
    best_rates: Mapping[float, float] = field(default_factory=dict)
    next_run: NextRun | None = None
    notes: tuple[str, ...] = ()
    full_text: str | None = None

    @property
    def best(self) -> dict[str, Any] | None:
        """The recommended row of the table; None without one."""
        return None if self.answer is None else self.answer.best

    @property
    def table(self) -> pd.DataFrame:
        """The table of times and costs; steps by batch size if no step is timed."""
        return self.steps if self.answer is None else self.answer.table

    @property
    def is_answered(self) -> bool:
        """Whether a batch size is recommended; without step times, whether B_crit is known."""
        if self.answer is not None:
            return self.answer.best is not None
        return isinstance(self.law, Law) and self.law.is_b_crit_known

    @property
    def exit_code(self) -> int:
        """The exit code of the command."""
        return ExitCode.DONE if self.is_answered else ExitCode.NO_RESULT

    @property
    def text(self) -> str:
        """The answer as text, with its notes."""
        return self.text_at(None)

    def text_at(self, terminal: int | None) -> str:
        """Return the answer as text for a terminal of some columns; None for a file."""
        if self.full_text is not None:
            return self.full_text
        width = width_at(terminal)
        goal = "" if self.goal is None else f": {self.goal}"
        lines = [f"advice on {self.name}{goal}", ""]
        if self.answer is None:
            lines += [*wrapped([NO_TIMES], width=width), ""]
        if isinstance(self.law, Law):
            lines += wrapped([self.law.line()], width=width)
        if self.answer is None:
            lines += ["", *_steps_text(self.steps)]
        else:
            lines += [*wrapped([self.answer.step_time.describe()], width=width), ""]
            is_below_law = isinstance(self.law, Law)
            answer = render(self.answer, terminal=terminal, is_below_law=is_below_law)
            lines += answer.splitlines()
        lines.append("")
        # With a recommendation, the answer has this sentence.
        if self.next_run is not None and self.best is None:
            lines += wrapped([self.next_run.describe()], width=width)
        lines += wrapped((f"note: {note}" for note in self.notes), width=width)
        return "\n".join(lines) + "\n"

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return self.text

    # ---- For machines ----

    def to_dict(self) -> dict[str, Any]:
        """Return the advice as plain values for strict JSON (`Document`)."""
        further = {
            "near_best": self._near_best(),
            "measured": self._measured(),
            "next_run": self._next_run(),
            "assumed": [] if self.answer is None else list(self.answer.assumed),
        }
        document = Document(
            source=self.source,
            status=ANSWERED if self.is_answered else NO_RESULT,
            name=self.name,
            goal=self.goal,
            cells=[self._cell(row) for row in records(self.table)],
            laws=[_law_entry(self.law)],
            recommendation=self._recommendation(),
            notes=self.notes,
            further=further,
        )
        return document.to_dict()

    def to_json(self) -> str:
        """Return the advice as one JSON document."""
        return to_json(self.to_dict())

    def _recommendation(self) -> dict[str, Any] | None:
        if self.answer is None or self.answer.best is None:
            return None
        row = self._cell(self.answer.best)
        row["learning_rate"] = None
        rate = self.answer.rate
        # If momentum is searched, the law is of the effective rate.
        if rate is not None and " / " not in rate.name:
            row["learning_rate"] = rate.at(self.answer.best["batch_size"])
        return row

    def _cell(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return a row of the table as an entry of `Document.cells`, with hours and costs."""
        known = _with_nested_limits(row)
        batch_size = known["batch_size"]
        entry = CellEntry(batch_size=batch_size, devices=known.pop("devices", None))
        for observation in self.law.observations:
            if observation.batch_size == batch_size:
                entry.k_star = limits_of(observation.k, observation.limits)
                entry.bound = BOUNDS[observation.bound]
        steps = known["steps"]["value"]
        if "examples" not in known and steps is not None:
            known["examples"] = CONSTANT_BATCH.examples_of(steps, batch_size)
        if "hours" in known:
            hours = [known["hours"][name] for name in ("value", "low", "high")]
            entry.seconds = limits(*[None if each is None else HOUR * each for each in hours])
            entry.total_seconds = entry.seconds
        if batch_size in self.best_rates:
            entry.metaparameters = {"learning_rate": self.best_rates[batch_size]}
        marks = {name: known.pop(name, False) for name in ("allowed", "pareto")}
        marks["fastest"] = self.answer is not None and is_same_row(self.answer.fastest, row)
        entry.marks = [name for name, holds in marks.items() if holds]
        return {**asdict(entry), **known}

    def _near_best(self) -> dict[str, Any] | None:
        if self.answer is None or self.answer.interval is None:
            return None
        assert self.answer.fastest is not None
        low, high = self.answer.interval
        devices = int(self.answer.fastest["devices"])
        return {"batch_size_low": low, "batch_size_high": high, "devices": devices}

    def _measured(self) -> list[dict[str, Any]]:
        """Return the observations of K, by batch size."""
        rows = []
        for o in self.law.observations:
            row = {
                "batch_size": o.batch_size,
                "steps": o.k,
                "expected_steps": o.expected_k,
                "bound": BOUNDS[o.bound],
                # 0 is an unknown noise.
                "log_error": math.sqrt(o.variance) if o.noise else None,
                "learning_rate": self.best_rates.get(o.batch_size),
            }
            rows.append(row)
        return rows

    def _next_run(self) -> dict[str, Any] | None:
        if self.next_run is None:
            return None
        run = self.next_run._asdict()
        run["variance_removed"] = run.pop("share")
        return run


def _steps_text(steps: pd.DataFrame) -> list[str]:
    """Return a table of steps by batch size, for runs without times."""
    rows = []
    for row in steps.to_dict("records"):
        text = "-"
        examples = "-"
        if row["known"] != "refused":
            mark = MARKS.get(row["known"], "")
            text = mark + estimate(row["steps"], Interval(row["low"], row["high"]))
            examples = significant(row["steps"] * row["batch_size"])
        rows.append({"B": f"{row['batch_size']:g}", "steps": text, "examples": examples})
    lines = aligned(rows)
    sources = set(steps["known"])
    legend = [f"{mark} {source}" for source, mark in MARKS.items() if source in sources]
    if legend:
        lines.append("  " + "; ".join(legend))
    return lines


def _with_nested_limits(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of a table; a value with limits becomes {value, low, high}."""
    ends = {f"{name}{end}" for name in UNCERTAIN for end in ("_low", "_high")}
    nested = {}
    for key, value in row.items():
        if key in ends or key in ("low", "high"):
            continue
        low, high = f"{key}_low", f"{key}_high"
        if key == "steps" and low not in row:
            low, high = "low", "high"  # of `Law.predict`
        name = "steps_known" if key == "known" else key
        nested[name] = _none_if_nan(value)
        if low in row:
            nested[name] = limits(
                _none_if_nan(value), _none_if_nan(row[low]), _none_if_nan(row[high])
            )
    return nested


def _law_entry(law: Law | Branched) -> LawEntry:
    """Return the constants of a law with 95 % limits, and why they are refused."""
    if isinstance(law, Branched):
        return LawEntry(kind="branches", batch_sizes=[law.batch_size])
    return law_entry(law)


def _none_if_nan(value: Any) -> Any:
    """Return a value of a table; None if it is nan, which marks a missing value."""
    if isinstance(value, float) and math.isnan(value):
        return None
    return value
