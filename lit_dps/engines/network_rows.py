"""NetworkRows: networks that train together, one a row."""

from __future__ import annotations

from collections.abc import Sequence

from lit_dps.engines.network_run import NetworkRun


class NetworkRows:
    """Networks that train together, one a row. The defaults are those of a single network.

    Args:
        runs: The runs, one a row.

    Attributes:
        runs: The run of each row; None if the row is empty.
    """

    def __init__(self, runs: Sequence[NetworkRun]):
        self.runs: list[NetworkRun | None] = list(runs)

    @property
    def live(self) -> list[int]:
        """The rows with a run. The others are trained too, and their results are ignored."""
        return [row for row, run in enumerate(self.runs) if run is not None]

    def run_at(self, row: int) -> NetworkRun:
        """Return the run of a live row."""
        run = self.runs[row]
        assert run is not None
        return run

    def snapshot(self, interval: int, intervals: int) -> None:
        """Keep the rows as they are after an interval, for its validation.

        Args:
            interval: Number of the interval since the last validations, from 0.
            intervals: How many intervals are trained before the next validations. A single network
                is validated after each.
        """

    def snapshot_index(self, interval: int, row: int) -> int:
        """Return the index of a row among the snapshots of all intervals and rows."""
        return interval * len(self.runs) + row

    def bytes_of_snapshot(self) -> int:
        """Return the size of what `snapshot` copies."""
        return 0

    def write_back(self, row: int, snapshot_index: int | None = None) -> None:
        """Copy the state of a row into the module, optimizer and schedule of its run.

        Args:
            row: The row.
            snapshot_index: The snapshot whose state is copied; None for the present state.
        """

    def write_back_weights(self, row: int) -> None:
        """Copy the weights and buffers of a row into the module of its run."""
