"""Kills the processes of small studies at random, and compares their results with unbroken studies.

    python -m tests.torture --kills 100 --storage sqlite,postgres --report docs/reliability.md

Several `study` commands share a study: in turn one of two workers, and one of two ranks that train
each trial together. While trials are trained a command, a worker, a rank, the server that forks
them or a whole command with all of them gets SIGKILL or SIGTERM (once or twice), or is stopped for
a while; what ended is started again. When a study is finished the next one begins, until there were
kills enough. Then faults of other kinds follow (`tests.torture_faults`).

Each stored result is compared with the result of an unbroken study on as many ranks. Two ranks equal
one process in distribution, not bit for bit: they add the gradients in another order. With a large
learning rate such a difference grows within some hundred steps, and K* and the table may differ.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, NullPool, create_engine, text
from sqlalchemy.exc import DBAPIError

from lit_dps.core.trial import RANKS
from lit_dps.storage.migrate import start_of
from tests.e2e.commands import command, environment, run
from tests.e2e.forks import Command
from tests.support.postgres import server
from tests.support.processes import forked_by, servers_of
from tests.torture_faults import run_faults
from tests.torture_report import CELLS, Report, page, row_of_fault

WORKERS = ("--study.workers", 2)
TWO_RANKS = ("--study.workers", 1, "--trainer.devices", 2, "--trainer.strategy", "ddp")
TOGETHER = (WORKERS, TWO_RANKS)  # what the processes of a command are, in turn
MEASURED = ("seconds", "timed")  # keys of a stored result that clocks decide
# Options of a study whose trials have batches that grow, masks that change, and a reading.
CHANGING = (
    # Masks that change slow each step down, so fewer steps take a second.
    *("--goal.max_steps", 400),
    *("--batch.schedule", "doubling", "--batch.options", '{"start": 0.25, "steps": 100}'),
    *("--pruning.method", "tests.support.user_readings.Redraws"),
    *("--study.readings", "[gradient_norm]"),
)
# what a command says that ends with 2 because another process of it was killed
KILLED = re.compile(r"worker \d+ was killed|of 2 ranks died|the same command resumes the study")
KINDS = {"KILL": 4, "TERM": 3, "TERM twice": 1, "KILL of a whole command": 2, "STOP": 1}
# of the kills have to cut a trial short, in a run of 100: else they hit processes that do nothing
SHARE = 0.6
IN_TRAINING = 0.2  # seconds after which a trial that is claimed is trained
OWNERS = """
    select a.value_json from trials t join trial_user_attributes a on a.trial_id = t.trial_id and a.key = 'owner'
    where t.state = 'RUNNING'"""
PROCESS = re.compile(r":(\d+)")  # in an owner, TOKEN@host:process or host:process:token
START_SECONDS = 60  # in which commands begin to train, also on a busy machine
QUERY = """
    select s.study_name, p.value_json, r.value_json from trials t join studies s on s.study_id = t.study_id
    join trial_user_attributes p on p.trial_id = t.trial_id and p.key = 'point'
    left join trial_user_attributes r on r.trial_id = t.trial_id and r.key = 'result'
    where t.state in ('COMPLETE', 'PRUNED', 'FAIL')"""

Results = dict[tuple[str, str], dict[str, Any]]  # by cell and point: a stored result


def ranks_of(result: Mapping[str, Any]) -> int:
    """Return how many ranks trained the trial of a stored result."""
    return result["flags"].get(RANKS, 1)


def changed_results(
    stored: Iterable[tuple[str, str, str]], unbroken: Mapping[int, Results]
) -> list[str]:
    """Return a line for each stored result that differs from that of an unbroken study.

    Args:
        stored: Cell, point and result of each finished trial.
        unbroken: The results of unbroken studies, by their number of ranks.
    """
    lines = []
    for cell, point, encoded in stored:
        result = json.loads(encoded)
        expected = unbroken[ranks_of(result)][cell, point]
        keys = [
            key
            for key in sorted(result.keys() | expected.keys())
            if key not in MEASURED and result.get(key) != expected.get(key)
        ]
        if keys:
            lines.append(f"{cell} point {point}: {', '.join(keys)} changed")
    return lines


def stored_results(engine: Engine) -> tuple[list[tuple[str, str, str]], int]:
    """Return cell, point and result of the finished trials, and how many have no result."""
    with engine.connect() as connection:
        rows = connection.execute(text(QUERY)).all()
    whole = [(name, point, result) for name, point, result in rows if result is not None]
    return whole, len(rows) - len(whole)


def unbroken_study(folder: Path, *options: object) -> Results:
    """Return the results of a study that nothing disturbs."""
    folder.mkdir()
    done = run(folder, *options, timeout=3600)
    assert done.returncode == 0, done.stderr
    engine = create_engine(f"sqlite:///{folder}/mlruns/study.db", poolclass=NullPool)
    stored, _ = stored_results(engine)
    return {(cell, point): json.loads(result) for cell, point, result in stored}


def is_alive(owner: str) -> bool:
    """Return whether the process that a trial's owner names is there; a killed one keeps its trial
    for a while."""
    return start_of(int(PROCESS.search(owner)[1])) not in ("", "dead")


class Crowd:
    """The commands that work on one study, each started again when it has ended."""

    def __init__(self, folder: Path, url: str, commands: int, report: Report):
        self.folder, self.url, self.report = folder, url, report
        self.processes: list[Command | None] = [None] * commands
        self.started = 0
        self.engine = create_engine(url, poolclass=NullPool)

    def keep_up(self) -> None:
        """Starts what does not run, and looks at how it ended."""
        for i, process in enumerate(self.processes):
            if process is None or process.poll() is not None:
                self.look_at(process)
                log = self.folder / f"output-{self.started}.txt"
                options = (*TOGETHER[i % len(TOGETHER)], "--storage.optuna", self.url)
                with log.open("w") as out:
                    argv = command(*self.report.study, *options)[1:]
                    self.processes[i] = Command(
                        argv, self.folder, environment(), out, out, start_new_session=True
                    )
                self.processes[i].log = log
                self.started += 1

    def look_at(self, process: Command | None) -> None:
        if process is None:
            return
        said, code = process.log.read_text(), process.returncode
        expected = code in (0, 4, 130, -signal.SIGKILL, -signal.SIGTERM) or (
            code == 2 and KILLED.search(said)
        )
        if not expected or "Traceback" in said:
            last = said.strip().splitlines()[-1:] or ["nothing said"]
            self.report.unexpected.append(f"exit code {code}: {last[0]}")

    def wait_for_training(self, left: int, dice: random.Random) -> None:
        """Waits until every command has as many trials in training as it trains at a time; `left`
        are all there are."""
        end, wanted = time.monotonic() + START_SECONDS, 0
        while time.monotonic() < end:
            living = [i for i, process in enumerate(self.processes) if process.poll() is None]
            wanted = sum(
                1 if "--trainer.devices" in TOGETHER[i % len(TOGETHER)] else 2 for i in living
            )
            with suppress(DBAPIError), self.engine.connect() as connection:
                owners = connection.execute(text(OWNERS)).scalars().all()
                if sum(map(is_alive, owners)) >= min(wanted, left):
                    break
            time.sleep(0.02)
        time.sleep(dice.uniform(0.5, 1) * IN_TRAINING)

    def strike(self, left: int, dice: random.Random) -> None:
        """One kill, of one kind, as far as one can tell from outside of processes that train."""
        self.wait_for_training(left, dice)
        process = dice.choice(self.processes)
        if process.poll() is not None:
            return
        kind = dice.choices(list(KINDS), KINDS.values())[0]
        victim = dice.choice([process.pid, *forked_by(process.pid), *servers_of(process.pid)])
        with suppress(ProcessLookupError):
            if kind == "KILL of a whole command":
                os.killpg(process.pid, signal.SIGKILL)
            elif kind == "STOP":
                os.kill(victim, signal.SIGSTOP)
                time.sleep(dice.uniform(0.5, 4))
                os.kill(victim, signal.SIGCONT)
            else:
                os.kill(victim, signal.SIGKILL if kind == "KILL" else signal.SIGTERM)
                if kind == "TERM twice":
                    time.sleep(dice.uniform(0, 0.5))
                    os.kill(victim, signal.SIGTERM)
            self.report.kills[kind] += 1

    def stored(self) -> tuple[Counter, int]:
        """How often each result is stored, as (cell, point, digest), and how many trials ended
        without one."""
        with suppress(DBAPIError):
            whole, missing = stored_results(self.engine)
            digests = [
                (name, point, hashlib.sha256(result.encode()).hexdigest())
                for name, point, result in whole
            ]
            return Counter(digests), missing
        return Counter(), 0  # the tables are not made yet, or a writer is at it

    def end(self) -> None:
        """Kills all: also when the torture itself fails."""
        for process in filter(None, self.processes):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def one_study(
    folder: Path,
    url: str,
    unbroken: Mapping[int, Results],
    kills: int,
    report: Report,
    dice: random.Random,
    pace: float,
):
    """Runs a study to its end under fire, until `kills` is reached; then lets it end."""
    crowd, seen = Crowd(folder, url, report.commands, report), Counter()
    try:
        while len({key[:2] for key in seen}) < report.points:
            crowd.keep_up()
            time.sleep(dice.uniform(0, 2 * pace))
            if report.kills.total() < kills:
                crowd.strike(report.points - len({key[:2] for key in seen}), dice)
            now, _ = crowd.stored()
            if now:
                report.lost += len(seen.keys() - now.keys())
                seen = now
        for process in crowd.processes:
            process.wait(3600)
            crowd.look_at(process)
    finally:
        crowd.end()
    last = run(
        folder, *report.study, "--storage.optuna", url, timeout=3600
    )  # as a user does to see the result
    if last.returncode:
        report.unexpected.append(f"the last run: {last.stderr.strip()}")
    final, cut_short = crowd.stored()
    report.lost += len(seen.keys() - final.keys())
    report.doubled += final.total() - len({key[:2] for key in final})
    report.missing += report.points - len({key[:2] for key in final})
    report.cut_short += cut_short
    report.studies += 1
    stored, _ = stored_results(crowd.engine)
    report.on_ranks += sum(ranks_of(json.loads(result)) > 1 for _, _, result in stored)
    changed = changed_results(stored, unbroken)
    report.changed += len(changed)
    for line in changed:
        print(line, file=sys.stderr, flush=True)


@contextmanager
def databases(storage: str, folder: Path) -> Iterator:
    """A function that gives the URL of a new database for each study."""
    if storage == "sqlite":
        yield lambda i: f"sqlite:///{folder}/{i}/study.db"
    else:
        with server() as running:
            yield lambda i: running.new_database(f"torture_{i}")


def torture(
    storage: str,
    kills: int,
    commands: int = 2,
    trials: int = 8,
    seed: int = 0,
    pace: float = 1.0,
    hits: int = 0,
    options: tuple = (),
) -> Report:
    """At least so many kills and `hits`, trials cut short by one; a strike every `pace` seconds in
    the mean.

    Each study has so many trials in a cell, and further `options`.
    """
    report, dice, begin = Report(storage, commands, trials), random.Random(seed), time.monotonic()
    report.options = options
    with (
        tempfile.TemporaryDirectory(prefix="lit_dps-torture-") as name,
        databases(storage, Path(name)) as database,
    ):
        unbroken = {
            1: unbroken_study(Path(name) / "one", *report.study),
            2: unbroken_study(Path(name) / "two", *report.study, *TWO_RANKS),
        }
        while report.kills.total() < kills or report.cut_short < hits:
            more = max(kills, report.kills.total() + 5)
            folder = Path(name) / str(report.studies)
            folder.mkdir()
            one_study(folder, database(report.studies), unbroken, more, report, dice, pace)
            report.seconds = time.monotonic() - begin
            print(report.line(), file=sys.stderr, flush=True)
    return report


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--kills", type=int, default=100, help="On each storage; 0 leaves them out."
    )
    parser.add_argument(
        "--faults",
        type=int,
        default=1,
        help="How often each other fault is tried; 0 leaves them out.",
    )
    parser.add_argument("--commands", type=int, default=2)
    parser.add_argument(
        "--storage", default="sqlite", help="sqlite, postgres or both with a comma between"
    )
    parser.add_argument(
        "--trials", type=int, default=8, help=f"of each of the {CELLS} cells of a study"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--pace", type=float, default=1.0, help="seconds between two strikes, in the mean"
    )
    parser.add_argument(
        "--changing",
        action="store_true",
        help="Batches grow, masks change, and a reading is taken along the trials.",
    )
    parser.add_argument("--report", type=Path, help="Markdown file to write the result to.")
    args = parser.parse_args()
    options = CHANGING if args.changing else ()
    how = (args.kills, args.commands, args.trials, args.seed, args.pace, 0, options)
    reports = []
    if args.kills:
        reports = [torture(storage, *how) for storage in args.storage.split(",")]
    for report in reports:
        print(report.line())
    faults = run_faults(args.faults) if args.faults else []
    for fault in faults:
        print(row_of_fault(fault))
    if args.report:
        known = args.report.read_text(encoding="utf-8") if args.report.exists() else ""
        args.report.write_text(page(reports, faults, sys.argv[1:], known), encoding="utf-8")
    is_good = all(report.good and report.share >= SHARE for report in reports)
    return 0 if is_good and all(fault.good for fault in faults) else 1


if __name__ == "__main__":
    sys.exit(main())
