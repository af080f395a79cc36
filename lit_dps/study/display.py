"""The live display of a study at a terminal: a bar, K* of each cell, and the running trials."""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence

from rich.cells import cell_len
from rich.console import Console, ConsoleRenderable, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from lit_dps.core.goal import Goal
from lit_dps.core.progress_line import print_wrapped
from lit_dps.core.trial import Cell, Series, TrialKey, TrialResult
from lit_dps.core.unit import cost_text
from lit_dps.parallel.process import StopRequest
from lit_dps.study.progress import Progress
from lit_dps.study.progress_event import ProgressEvent
from lit_dps.study.remaining_time import clock
from lit_dps.study.setup import StudySetup

REFRESHES_PER_SECOND = 2
MAX_RUNNING_SHOWN = 8
MIN_TABLE_LINES = 3
LEAVING = "{}: stopping after the next validation; again: stop now"


class ReflowedLive(Live):
    """A `Live` that leaves no old lines behind when the terminal becomes narrower.

    Terminals wrap the lines on the screen at their new width. The next drawing then has to erase
    more rows than lines. xterm cuts the lines instead.
    """

    _drawn_columns = 0
    _line_lengths: Sequence[int] = ()

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        """Return what the console prints: the erasing of the last drawing, and the next one."""
        render = self._live_render
        columns = self.console.width
        if columns < self._drawn_columns and not os.environ.get("XTERM_VERSION"):
            rows = sum(rows_of_line(length, columns) for length in self._line_lengths)
            render._shape = (columns, rows)
        parts = super().process_renderables(renderables)
        self._drawn_columns = columns
        lines = self.console.render_lines(render.renderable, pad=False)
        self._line_lengths = [Segment.get_line_length(line) for line in lines]
        return parts


def rows_of_line(length: int, columns: int) -> int:
    """Return the rows that a line takes in a terminal; an empty line takes one row."""
    return max(1, math.ceil(length / columns))


class Display:
    """Shows the progress of a study in place, as wide as the terminal.

    Other output appears above it.

    Args:
        progress: The progress.
        name: Name of the study.
        goal: Its goal.
        stop: Requests to stop, which are shown.
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
        self.progress = progress
        self.name = name
        self.goal = goal
        self.stop = stop
        self.console = console or Console(stderr=True, highlight=False, markup=False, emoji=False)
        # A thread of rich draws the screen, so that its clock runs while a step takes minutes.
        self._lock = threading.RLock()
        self._start = time.monotonic()
        self._is_closed = False
        self._finished: dict[Cell, int] | None = None  # by cell; None if a result came since
        self._live = ReflowedLive(
            console=self.console,
            get_renderable=self.render,
            refresh_per_second=REFRESHES_PER_SECOND,
            redirect_stdout=sys.stdout.isatty(),
            vertical_overflow="crop",
        )

    def show(self) -> None:
        """Begin to draw."""
        stdout, stderr = sys.stdout, sys.stderr

        def in_child() -> None:
            # A forked process, for example of a data loader, prints directly and draws nothing.
            if self._live.is_started:
                sys.stdout, sys.stderr = stdout, stderr

        self.stop.shown = True
        self._live.start()
        os.register_at_fork(after_in_child=in_child)

    def update(self, result: TrialResult) -> None:
        """Add a new result."""
        with self._lock:
            self.progress.add(result)
            self._finished = None

    def on_event(self, event: ProgressEvent) -> None:
        """Update the progress of a running trial, or remove the trials of a killed worker."""
        with self._lock:
            self.progress.on_event(event)

    def close(self) -> None:
        """Stop drawing; the bar stays."""
        with self._lock:
            self._is_closed = True
        self._live.stop()
        self.stop.shown = False

    def render(self) -> RenderableType:
        """Return what is on the screen."""
        with self._lock:
            if self._finished is None:
                self._finished = self.progress.finished()
            finished = self._finished
            times = self._times()
            parts: list[RenderableType] = [self._bar(finished), times]
            if not self._is_closed:
                running = sorted(self.progress.running, key=_order_of)
                lines = self.console.height - 6 - min(len(running), MAX_RUNNING_SHOWN + 1)
                lines -= len(times) // self.console.width  # further lines of the times
                lines = max(lines, MIN_TABLE_LINES)
                parts += ["", *self._k_star_tables(finished, running, lines)]
                parts += ["", self._running_table(running)]
                if self.stop.signal is not None:
                    parts.append(Text(LEAVING.format(self.stop.signal), "yellow"))
        return Group(*parts)

    def _bar(self, finished: Mapping[Cell, int]) -> Table:
        done = sum(finished.values())
        total = len(finished) * self.progress.plan.trials
        if self.progress.plan.repeats.count:
            repeats = self.progress.repeat_counts()
            done += repeats.finished
            total += sum(repeats)
        grid = Table.grid(padding=(0, 1), expand=True)
        grid.add_column(no_wrap=True, max_width=max(10, self.console.width // 3))
        grid.add_column(ratio=1)
        grid.add_column(no_wrap=True)
        grid.add_row(self.name, ProgressBar(max(total, 1), done), f"{done}/{total} trials")
        return grid

    def _times(self) -> Text:
        now = time.monotonic()
        parts = [f"{clock(now - self._start)} elapsed"]
        if not self._is_closed:
            parts.append(f"remaining {self.progress.remaining_time_text()}")
            running = len(self.progress.running)
            parts.append(f"{running} of {self.progress.plan.at_a_time} running")
        failed = self.progress.failed()
        if failed:
            parts.append(f"{failed} failed")
        return Text(", ".join(parts))

    def _k_star_tables(
        self, finished: Mapping[Cell, int], running: Sequence[ProgressEvent], lines: int
    ) -> list[RenderableType]:
        """Return tables of K* by series and batch size that fit into the width and `lines`.

        If not all batch sizes fit, the batch sizes of running trials are shown.
        """
        texts = {cell: self._k_star_text(cell, finished[cell]) for cell in finished}
        series = sorted({cell.series for cell in texts})
        widths = _column_widths(texts)
        longest_name = max(cell_len(str(each)) for each in series)
        name_width = min(longest_name, self.console.width // 2)
        blocks = _blocks(widths, self.console.width - name_width)
        lines_of_block = len(series) + 1  # with its header
        if len(blocks) * lines_of_block > lines:
            blocks = _blocks_of_running(blocks, running)[: max(1, lines // lines_of_block)]
        lines_for_series = lines // len(blocks) - 1
        if lines_of_block > lines:
            lines_for_series -= 1  # for the line that counts the other series
        shown = series[: max(1, lines_for_series)]
        parts: list[RenderableType] = []
        for block in blocks:
            head = self.goal.cost_unit.head
            parts.append(_k_star_table(block, shown, texts, (head, name_width), widths))
        if len(shown) < len(series):
            parts.append(Text(f"and {len(series) - len(shown)} more series", "dim"))
        return parts

    def _k_star_text(self, cell: Cell, finished: int) -> str:
        """Return K* of a cell, or how many of its trials finished.

        "<=" marks a K* that further trials may lower, or that the first validation met. Failed
        trials run again when the study is resumed.
        """
        k_star = self.progress.k_star(cell)
        trials = self.progress.plan.trials
        is_complete = finished - self.progress.failed_in(cell) >= trials
        if k_star is not None:
            is_bound = not is_complete or self.progress.is_at_first_check(cell, self.goal)
            return f"{'<=' * is_bound}{cost_text(k_star)}"
        if finished >= trials:
            return "-"
        if self.progress.results[cell]:
            return f"{finished}/{trials}"
        return "."

    def _running_table(self, running: Sequence[ProgressEvent]) -> Table:
        table = Table(box=None, padding=(0, 2, 0, 0), show_edge=False, header_style="bold")
        table.add_column("running", no_wrap=True)
        table.add_column("step", justify="right", no_wrap=True)
        table.add_column(f"best {self.goal.metric}", justify="right", no_wrap=True)
        for event in running[:MAX_RUNNING_SHOWN]:
            table.add_row(str(event.trial), f"{event.step:,}", _best_text(event))
        if len(running) > MAX_RUNNING_SHOWN:
            table.add_row(f"and {len(running) - MAX_RUNNING_SHOWN} more")
        return table


def _best_text(event: ProgressEvent) -> str:
    if event.best is None:
        return "-"
    if event.exact:
        return f"{event.best:.4g}"
    return f">= {event.best:.4g}"


def _column_widths(texts: Mapping[Cell, str]) -> dict[int, int]:
    """Return the width of the column of each batch size, sorted by batch size."""
    widths = {}
    for size in sorted({cell.batch_size for cell in texts}):
        widths[size] = len(f"B={size}") + 2
    for cell, text in texts.items():
        widths[cell.batch_size] = max(widths[cell.batch_size], len(text) + 2)
    return widths


def _blocks(widths: Mapping[int, int], width: int) -> list[list[int]]:
    """Divide batch sizes into blocks whose columns fit into a width."""
    blocks: list[list[int]] = [[]]
    for size in widths:
        columns = [*blocks[-1], size]
        if blocks[-1] and sum(widths[each] for each in columns) > width:
            blocks.append([])
        blocks[-1].append(size)
    return blocks


def _blocks_of_running(
    blocks: Sequence[list[int]], running: Sequence[ProgressEvent]
) -> list[list[int]]:
    """Return the blocks with batch sizes of running trials; all blocks if no trial runs."""
    sizes = set()
    for event in running:
        if event.trial is not None:
            sizes.add(event.trial.cell.batch_size)
    if not sizes:
        return list(blocks)
    return [block for block in blocks if not sizes.isdisjoint(block)]


def _k_star_table(
    sizes: Sequence[int],
    series: Sequence[Series],
    texts: Mapping[Cell, str],
    first_column: tuple[str, int],
    widths: Mapping[int, int],
) -> Table:
    table = Table(box=None, padding=0, show_edge=False, header_style="bold")
    head, name_width = first_column
    table.add_column(head, width=name_width, no_wrap=True)
    for size in sizes:
        table.add_column(f"B={size}", justify="right", width=widths[size], no_wrap=True)
    for each in series:
        row = [texts.get(Cell(size, each.sparsity, each.axes), "") for size in sizes]
        table.add_row(str(each), *row)
    return table


def _order_of(event: ProgressEvent) -> TrialKey:
    assert event.trial is not None
    return event.trial.key


def print_line(setup: StudySetup, line: str) -> None:
    """Print a line about a study."""
    print_wrapped(f"study {setup.study.name}: {line}")


def print_line_at_terminal(setup: StudySetup, activity: str) -> None:
    """Print at a terminal what takes the next seconds; print nothing into a log."""
    if at_terminal():
        print_line(setup, f"{activity} ...")


def at_terminal() -> bool:
    """Return True if stderr is a terminal that can be drawn on."""
    return sys.stderr.isatty() and not Console(stderr=True).is_dumb_terminal
