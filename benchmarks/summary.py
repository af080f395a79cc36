"""The performance table of docs/scaling.md: a line for each thing that a report measured.

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
from benchmarks.text import NO_GPU, between, ratio

BEGIN, END = "<!-- benchmarks -->\n", "<!-- end of benchmarks -->"
TOLD = ("Optuna: tell one, ask the next", "MLflow: logging a trial")
Line = tuple[str, str, str]  # what, over which baseline, the ratio


def summary(report: Report, path: str) -> str:
    """The table as markdown, with where its numbers come from.

    Args:
        report: The report.
        path: Where it lies, for the reader.
    """
    lines = [
        line for name, section in report.sections.items() for line in LINES[name](section.numbers)
    ]
    rows = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    here = ", ".join([report.machine["CPU"], f"{report.machine['cores']} cores", report.date])
    source = f"{here}; all numbers, their spread and commands: [{path}](../{path})."
    return f"| | baseline | ratio |\n|---|---|---|\n{rows}\n\n{source}\n"


def put(text: str, page: str) -> str:
    """The page with the table between its marks. Raises ValueError if they are not there."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


def _startup(found: Mapping[str, Any]) -> Iterator[Line]:
    baseline, *rows = found["rows"]
    for row in rows:
        yield row["what"], f"`{baseline['what']}`", ratio(row["ratio"]["median"])


def _protocol(found: Mapping[str, Any]) -> Iterator[Line]:
    for cell in found["cells"]:
        n, k = sum(cell["counts"].values()), cell["k_star"]
        what = (
            f"the paper's protocol: MNIST, B = {cell['batch_size']}, {n} trials, budget "
            f"{found['max_steps']:,}"
        )
        for paper, memory in (("paper", ""), ("kept", ", but memory kept")):
            baseline = f"ours, the same K\\* = {k:,}" if k else "ours"
            yield (
                what + memory,
                baseline,
                f"{between(Bounds(**cell[paper]['ratio']), ratio)}, extrapolated",
            )


def _step(found: Mapping[str, Any]) -> Iterator[Line]:
    for key, what in (
        ("lean_ratio", "a step, its loop within Lightning"),
        ("lightning_ratio", "a step by Lightning"),
    ):
        rows = [row for row in found["rows"] if row["sparsity"] == 0]
        ratios = ", ".join(ratio(row[key]["median"]) for row in rows)
        yield f"{what}, B = {_list(rows)}", "a bare PyTorch loop", ratios


def _workers(found: Mapping[str, Any]) -> Iterator[Line]:
    rows = [row for row in found["rows"] if row["workers"] > 1]
    if rows:
        what = (
            f"trials an hour of {rows[0]['workers']} workers with a thread each, B = {_list(rows)}"
        )
        yield (
            what,
            "one worker with all threads",
            ", ".join(ratio(row["ratio"]["median"]) for row in rows),
        )


def _checks(found: Mapping[str, Any]) -> Iterator[Line]:
    yield (
        f"a full check of {found['size']:,} images",
        "one that stops when it knows",
        ratio(found["mean_ratio"]),
    )


def _fused(found: Mapping[str, Any]) -> Iterator[Line]:
    for device, where in (("cpu", "one CPU thread"), ("cuda", "the GPU")):
        ratios = [
            row["ratio"]["median"] for row in found["rows"] if row["device"].startswith(device)
        ]
        shown = f"{ratio(min(ratios))} to {ratio(max(ratios))}" if ratios else NO_GPU
        yield f"steps a second in lockstep on {where}", "one trial at a time", shown


def _scaling(found: Mapping[str, Any]) -> Iterator[Line]:
    for series in found["series"]:
        if (
            series["size"] in ("finished trials of the cell", "logged trials")
            and series["what"] in TOLD
        ):
            (few, *_, many), (first, *_, last) = series["sizes"], series["seconds"]
            what = f"{series['what']}, beside {many:,} {series['size']}"
            yield what, f"beside {few:,}", ratio(last["median"] / first["median"])


def _analyze(found: Mapping[str, Any]) -> Iterator[Line]:
    baseline, *rows = found["rows"]
    for row in rows:
        if row["what"].startswith("`analyze`"):
            what = f"{row['what']}, {found['cells']} cells, {found['trials']:,} trials: CPU seconds"
            yield what, baseline["what"], ratio(row["ratio"]["median"])


def _allocator(found: Mapping[str, Any]) -> Iterator[Line]:
    what = "; ".join(row["what"] for row in found["rows"])
    yield (
        f"freed memory given back: {what}",
        "kept",
        ", ".join(ratio(row["ratio"]["median"]) for row in found["rows"]),
    )


def _memory(found: Mapping[str, Any]) -> Iterator[Line]:
    for row in found["rows"]:
        if row["sparsity"] == 0:
            yield (
                f"memory of a worker, B = {row['batch_size']:,}",
                "-",
                f"{row['peak'] / 1024:.1f} GiB",
            )


def _list(rows: list[Mapping[str, Any]]) -> str:
    return ", ".join(str(row["batch_size"]) for row in rows)


LINES: dict[str, Callable[[Mapping[str, Any]], Iterator[Line]]] = {
    "startup": _startup,
    "protocol": _protocol,
    "step": _step,
    "workers": _workers,
    "checks": _checks,
    "fused": _fused,
    "scaling": _scaling,
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
