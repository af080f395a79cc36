"""Numbers and tables as markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from benchmarks.numbers import Bounds, Sample
from lit_dps.core.text import format_duration

NO_GPU = "not measured: no GPU here"


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A markdown table, numbers to the right."""
    lines = [head, ["---:"] * len(head), *([str(x) for x in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def spread(sample: Sample, form: Callable[[float], str]) -> str:
    """The median, and the smallest and the largest of the repeats where there are several."""
    if len(sample.values) == 1:
        return form(sample.median)
    return f"{form(sample.median)} ({form(sample.low)} to {form(sample.high)})"


def seconds(sample: Sample) -> str:
    """Seconds in a unit that suits them, with their spread."""
    return spread(sample, format_duration)


def times(sample: Sample) -> str:
    """A ratio with its spread: x1.05 (x1.03 to x1.10)."""
    return spread(sample, ratio)


def ratio(x: float) -> str:
    """A ratio with three digits; whole from 100 on."""
    return f"x{x:,.0f}" if x >= 100 else f"x{x:#.3g}"


def between(bounds: Bounds, form: Callable[[float], str]) -> str:
    """An estimate and its bounds, the bounds alone where there is none, or the number where it is
    known."""
    if bounds.lower == bounds.upper:
        return form(bounds.lower)
    both = f"{form(bounds.lower)} to {form(bounds.upper)}"
    return both if bounds.estimate is None else f"{form(bounds.estimate)} ({both})"
