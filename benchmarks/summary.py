"""The performance table of docs/scaling.md: the numbers of a report that decide what to use.

    python -m benchmarks.summary benchmarks/results/REPORT.json docs/scaling.md

puts it between the page's two marks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.numbers import Bounds
from benchmarks.report import Report, read
from benchmarks.text import between, ratio

BEGIN, END = "<!-- benchmarks -->\n", "<!-- end of benchmarks -->"
Line = tuple[str, str, str]  # what, over which baseline, the ratio


def summary(report: Report, path: str) -> str:
    """The table as markdown, with where its numbers come from.

    Args:
        report: The report.
        path: Where it lies, for the reader.
    """
    lines: list[Line] = []
    for name, section in report.sections.items():
        if name in LINES:
            lines.extend(LINES[name](section.numbers))
    rows = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    here = ", ".join([report.machine["CPU"], f"{report.machine['cores']} cores", report.date])
    source = f"{here}; all numbers, their spread and commands: [{path}](../{path})."
    return f"| | baseline | ratio |\n|---|---|---|\n{rows}\n\n{source}\n"


def put(text: str, page: str) -> str:
    """The page with the table between its marks. Raises ValueError if they are not there."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


def _protocol(found: Mapping[str, Any]) -> Iterator[Line]:
    for cell in found["cells"]:
        trials = sum(cell["counts"].values())
        what = (
            f"the paper's protocol: MNIST, B = {cell['batch_size']}, {trials} trials of at most "
            f"{found['max_steps']:,} steps"
        )
        baseline = "ours"
        if cell["k_star"]:
            baseline += f", the same K\\* = {cell['k_star']:,}"
        paper = between(Bounds(**cell["paper"]["ratio"]), ratio)
        kept = between(Bounds(**cell["kept"]["ratio"]), ratio)
        yield what, baseline, f"{paper}; with kept memory {kept}; extrapolated"


def _step(found: Mapping[str, Any]) -> Iterator[Line]:
    for key, what in (
        ("lean_ratio", "a step of the interval loop"),
        ("lightning_ratio", "a step of Lightning's loop"),
    ):
        rows = [row for row in found["rows"] if row["sparsity"] == 0]
        ratios = ", ".join(ratio(row[key]["median"]) for row in rows)
        yield f"{what}, B = {_list(rows)}", "a bare PyTorch loop", ratios


def _workers(found: Mapping[str, Any]) -> Iterator[Line]:
    rows = [row for row in found["rows"] if row["workers"] > 1]
    if rows:
        what = f"trials an hour of {rows[0]['workers']} workers with one thread, B = {_list(rows)}"
        yield (
            what,
            "one worker with all threads",
            ", ".join(ratio(row["ratio"]["median"]) for row in rows),
        )


def _checks(found: Mapping[str, Any]) -> Iterator[Line]:
    yield (
        f"a full validation of {found['size']:,} images",
        "an early validation",
        ratio(found["mean_ratio"]),
    )


def _analyze(found: Mapping[str, Any]) -> Iterator[Line]:
    baseline, *rows = found["rows"]
    for row in rows:
        if row["what"].startswith("`analyze`"):
            what = f"{row['what']}, {found['cells']} cells, {found['trials']:,} trials: CPU seconds"
            yield what, baseline["what"], ratio(row["ratio"]["median"])


def _allocator(found: Mapping[str, Any]) -> Iterator[Line]:
    what = "; ".join(row["what"] for row in found["rows"])
    yield (
        f"without kept memory: {what}",
        "with it",
        ", ".join(ratio(row["ratio"]["median"]) for row in found["rows"]),
    )


def _memory(found: Mapping[str, Any]) -> Iterator[Line]:
    rows = [row for row in found["rows"] if row["sparsity"] == 0]
    peaks = ", ".join(f"{row['peak'] / 1024:.1f} GiB" for row in rows)
    yield f"memory of a worker, B = {_list(rows)}", "-", peaks


def _list(rows: list[Mapping[str, Any]]) -> str:
    return ", ".join(str(row["batch_size"]) for row in rows)


# The other sections of a report are in its own page only.
LINES: dict[str, Callable[[Mapping[str, Any]], Iterator[Line]]] = {
    "protocol": _protocol,
    "step": _step,
    "workers": _workers,
    "checks": _checks,
    "analyze": _analyze,
    "allocator": _allocator,
    "memory": _memory,
}


def main(source: str, page: str) -> None:
    """Puts the table of a report's JSON file into a page."""
    report, file = read(Path(source)), Path(page)
    assert report is not None, source
    file.write_text(put(summary(report, str(Path(source).with_suffix(".md"))), file.read_text()))


if __name__ == "__main__":
    main(*sys.argv[1:])
