"""python -m benchmarks: runs the sections and writes a dated report."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import shlex
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType

from benchmarks import SECTIONS
from benchmarks.options import FULL, QUICK, Options


def main(argv: list[str]) -> int:
    """Runs the command; returns its exit code."""
    parser = _parser()
    arguments = vars(parser.parse_args(argv))
    if unknown := set(arguments["sections"]) - set(SECTIONS):
        parser.error(f"no section {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    names: list[str] = arguments.pop("sections") or list(SECTIONS)
    output = arguments.pop("output")
    given = {
        key: tuple(v) if isinstance(v, list) else v for key, v in arguments.items() if v is not None
    }
    options = dataclasses.replace(QUICK if arguments["quick"] else FULL, **given)
    return run(names, options, Path(output), shlex.join(["python", "-m", "benchmarks", *argv]))


def run(names: list[str], options: Options, folder: Path, command: str) -> int:
    """Measures the sections and writes the report after each, so that what was measured is kept.

    Returns:
        The exit code: 1 if a section's `verify` found that two ways to the same result differ.
    """
    from benchmarks.machine import (
        commit,
        machine,
        slug,
        versions,
    )  # after --help, which needs no torch
    from benchmarks.report import Report

    here, date, of = (
        machine(),
        datetime.now(UTC).date().isoformat(),
        commit(),
    )  # before a report changes the tree
    stem = folder / "-".join([date, slug(here), *(["quick"] if options.quick else [])])
    failed = []
    for name in names:
        print(f"{name} ...", file=sys.stderr, flush=True)
        module = importlib.import_module(f"benchmarks.{name}")
        section, found = measure(name, module, options, command, of)
        Report(date, here, versions(), {name: section}).write(stem, SECTIONS)
        print(f"\n## {section.title}\n\n{section.text}\n", flush=True)
        try:
            getattr(module, "verify", lambda found: None)(found)
        except AssertionError as error:
            failed.append(f"{name}: {error}")
    print("\n".join([f"written: {stem}.{{md,json}}", *failed]))
    return 1 if failed else 0


def measure(name: str, module: ModuleType, options: Options, command: str, commit: str):
    """Measures a section.

    Returns:
        What the report has of it, and what its `measure` returned.
    """
    from benchmarks.machine import load
    from benchmarks.report import Section, plain

    begun, before, start = datetime.now(UTC), load(), time.perf_counter()
    found = module.measure(options)
    section = Section(
        name=name,
        title=module.TITLE,
        text=module.show(found),
        numbers=plain(found),
        command=command,
        commit=commit,
        begun=begun.strftime("%Y-%m-%d %H:%M:%S"),
        seconds=time.perf_counter() - start,
        load=before,
    )
    return section, found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m benchmarks", description=__doc__)
    parser.add_argument(
        "sections", nargs="*", metavar="SECTION", help=f"of {', '.join(SECTIONS)}; by default all"
    )
    parser.add_argument(
        "--quick", action="store_true", help="a smoke run of all code on digits, under a minute"
    )
    parser.add_argument(
        "--output", default="benchmarks/results", metavar="FOLDER", help="where the report goes"
    )
    numbers = parser.add_argument_group(
        "sizes", "by default those of a full run; see benchmarks/options.py"
    )
    numbers.add_argument("--repeats", type=int, help="rounds of each comparison of speeds")
    numbers.add_argument("--seconds", type=float, help="seconds of a timed run of steps")
    numbers.add_argument("--stored", type=int, nargs="+", help="scaling: numbers of stored trials")
    numbers.add_argument(
        "--trials", type=int, nargs="+", help="protocol: trials of a cell, for each batch size"
    )
    numbers.add_argument(
        "--batch-sizes", type=int, nargs="+", help="protocol: batch sizes of the cells"
    )
    numbers.add_argument(
        "--goal-error", type=float, help="protocol and checks: goal validation error"
    )
    numbers.add_argument("--max-steps", type=int, help="protocol: step budget")
    numbers.add_argument(
        "--calibrate",
        type=int,
        nargs="+",
        help="protocol: outraced trials to run to the budget, for each batch size",
    )
    numbers.add_argument(
        "--sample", type=int, help="protocol: trials of each cell to run both ways"
    )
    numbers.add_argument(
        "--study-seconds", type=float, help="stacked: time limit of the study in seconds"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
