"""The live display of a study at a terminal: a bar, K* of each cell as it fills in, and the trials
that run."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Sequence

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from lit_dps.core.goal import Goal
from lit_dps.core.trial import Cell, Series, Status, Trial, TrialResult
from lit_dps.parallel.process import StopRequest
from lit_dps.study.progress import Progress, clock
from lit_dps.study.worker_events import ProgressEvent

REFRESH = 2  # times a second
RUNNING = 8  # trials that run and are shown, at most
LEAVING = "{}: leaving at the next check; once more to leave now"


class Display:
    """Shows a study in place, as wide as the terminal is; what else is printed meanwhile stands
    above it.

    Args:
        progress: How far it has come.
        name: Of the study.
        goal: Its goal.
        stop: Who asks this process to leave.
        console: Where to show it; by default stderr.
    """

    def __init__(
        self,
        progress: Progress,
        name: str,
        goal: Goal,
        stop: StopRequest,
        console: Console | None = None,
    ):
        self.progress, self.name, self.goal, self.stop = progress, name, goal, stop
        self.console = console or Console(stderr=True, highlight=False, markup=False, emoji=False)
        self._running: dict[tuple, ProgressEvent] = {}
        # The screen is drawn by a thread of rich's, so that its clock runs on while a step takes
        # minutes.
        self._lock, self._began, self._ended = threading.RLock(), time.monotonic(), False
        self._known: tuple | None = None
        self._live = Live(
            console=self.console,
            get_renderable=self.render,
            refresh_per_second=REFRESH,
            redirect_stdout=sys.stdout.isatty(),
            vertical_overflow="crop",
        )

    def show(self) -> None:
        """Begins."""
        streams = sys.stdout, sys.stderr

        def in_child() -> None:  # of a loader of data, say: it prints by itself, and draws nothing
            if self._live.is_started:
                sys.stdout, sys.stderr = streams

        self.stop.shown = True
        self._live.start()
        os.register_at_fork(after_in_child=in_child)

    def update(self, result: TrialResult) -> None:
        """Takes a new result into account."""
        with self._lock:
            self.progress.take(result)
            self._running.pop(_place(result.trial), None)
            self._known = None

    def on_event(self, sighting: ProgressEvent) -> None:
        """Takes into account how far a trial has come."""
        with self._lock:
            if sighting.trial is None:
                self._running = {
                    k: seen for k, seen in self._running.items() if seen.worker != sighting.worker
                }
            else:
                self._running[_place(sighting.trial)] = sighting

    def close(self) -> None:
        """Ends: the bar stays."""
        with self._lock:
            self._ended = True
        self._live.stop()
        self.stop.shown = False

    def render(self) -> RenderableType:
        """What is on the screen."""
        with self._lock:
            if self._known is None:
                finished = self.progress.finished
                self._known = finished, self.progress.left(finished), time.monotonic()
            parts = [self._bar(), self._times()]
            if not self._ended:
                running = sorted(self._running.values(), key=lambda seen: _place(seen.trial))
                room = self.console.height - 6 - min(len(running), RUNNING + 1)
                parts += ["", *self._cells(running, max(room, 3)), "", self._trials(running)]
                if self.stop.signal is not None:
                    parts.append(Text(LEAVING.format(self.stop.signal), "yellow"))
        return Group(*parts)

    def _bar(self) -> Table:
        finished, *_ = self._known
        done, total = sum(finished.values()), len(finished) * self.progress.points
        if self.progress.plan.count:
            again, repeats = self.progress.repeated
            done, total = done + again, total + repeats
        grid = Table.grid(padding=(0, 1), expand=True)
        grid.add_column(no_wrap=True, max_width=max(10, self.console.width // 3))
        grid.add_column(ratio=1)
        grid.add_column(no_wrap=True)
        grid.add_row(self.name, ProgressBar(max(total, 1), done), f"{done}/{total} trials")
        return grid

    def _times(self) -> Text:
        _, left, at = self._known
        now = time.monotonic()
        text = f"{clock(now - self._began)} elapsed"
        if not self._ended:
            if left is None:
                text += ", time left not known yet"
            else:
                text += (
                    f", {'at least' if left.bound else 'about'} "
                    f"{clock(max(0.0, left.seconds - now + at))} left"
                )
            text += f", {self.progress.workers} at a time"
        failed = sum(
            r.status is Status.FAILED for done in self.progress.done.values() for r in done.values()
        )
        return Text(
            text + (f", {failed} failed" if failed else ""), no_wrap=True, overflow="ellipsis"
        )

    def _cells(self, running: Sequence[ProgressEvent], room: int) -> list[RenderableType]:
        """K* of each cell, batch sizes across, in as many blocks as the width needs; within so many
        lines."""
        series = list(dict.fromkeys(sorted(cell.series for cell in self.progress.done)))
        sizes = sorted({cell.batch_size for cell in self.progress.done})
        texts = {cell: self._text(cell) for cell in self.progress.done}
        first = max(cell_len(str(each)) for each in series)
        across = min(first, self.console.width // 2)
        wide = {size: len(f"B={size}") + 2 for size in sizes}
        for cell, text in texts.items():
            wide[cell.batch_size] = max(wide[cell.batch_size], len(text) + 2)
        blocks: list[list[int]] = [[]]
        for size in sizes:
            if (
                blocks[-1]
                and across + sum(wide[each] for each in (*blocks[-1], size)) > self.console.width
            ):
                blocks.append([])
            blocks[-1].append(size)
        if len(blocks) * (len(series) + 1) > room:  # then those that are being filled in
            now = {seen.trial.cell.batch_size for seen in running} or set(sizes)
            blocks = [block for block in blocks if now & set(block)][
                : max(1, room // (len(series) + 1))
            ]
        shown = series[: max(1, room // len(blocks) - 1 - (len(series) + 1 > room))]
        tables = [self._block(block, shown, texts, across, wide) for block in blocks]
        more = (
            [Text(f"and {len(series) - len(shown)} more series", "dim")]
            if len(shown) < len(series)
            else []
        )
        return [*tables, *more]

    def _block(
        self,
        sizes: Sequence[int],
        series: Sequence[Series],
        texts: dict[Cell, str],
        across: int,
        wide: dict[int, int],
    ) -> Table:
        table = Table(box=None, padding=0, show_edge=False, header_style="bold")
        table.add_column("K*", width=across, no_wrap=True)
        for size in sizes:
            table.add_column(f"B={size}", justify="right", width=wide[size], no_wrap=True)
        for each in series:
            cells = (Cell(size, each.sparsity, each.axes) for size in sizes)
            table.add_row(str(each), *(texts.get(cell, "") for cell in cells))
        return table

    def _text(self, cell: Cell) -> str:
        """K* of a cell, "<=" while trials may lower it and where the first check met the goal; or
        how many ended."""
        finished, *_ = self._known
        best, ended, points = self.progress.best(cell), finished[cell], self.progress.points
        if best is not None:
            return f"{best}" if ended >= points and best > self.goal.check_interval else f"<={best}"
        if ended >= points:
            return "-"
        return f"{ended}/{points}" if self.progress.done[cell] else "."

    def _trials(self, running: Sequence[ProgressEvent]) -> Table:
        table = Table(box=None, padding=(0, 2, 0, 0), show_edge=False, header_style="bold")
        table.add_column("running", no_wrap=True)
        table.add_column("step", justify="right", no_wrap=True)
        table.add_column(f"best {self.goal.metric}", justify="right", no_wrap=True)
        for seen in running[:RUNNING]:
            best = "-" if seen.best is None else f"{'' if seen.exact else '>= '}{seen.best:.4g}"
            table.add_row(str(seen.trial), f"{seen.step:,}", best)
        if len(running) > RUNNING:
            table.add_row(f"and {len(running) - RUNNING} more")
        return table


def _place(trial: Trial) -> tuple:
    return trial.cell, trial.point, trial.repeat


def at_terminal() -> bool:
    """Whether stderr is a terminal that can be drawn on."""
    return sys.stderr.isatty() and not Console(stderr=True).is_dumb_terminal
