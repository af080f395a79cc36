"""Heartbeat: ranks that find out when another one is dead, wherever they wait.

A process that is killed closes its connections, and whoever waits for it with gloo is told. Not so with NCCL, for a
process that is stopped, or for a machine that loses its power.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading

from torch.distributed import Store

GOES_ON = "the same command goes on"
BEAT = 2.0  # seconds
BEATS = 20  # own beats in which another rank shows no sign of life; a clock would count time that this one was stopped


class Heartbeat(threading.Thread):
    """A thread that shows the others that its process lives, and ends the process when another does not.

    Args:
        store: Where the ranks show it.
        rank: This process's rank.
        world: The number of ranks.
    """

    def __init__(self, store: Store, rank: int, world: int):
        super().__init__(daemon=True, name="heartbeat")
        self.store, self.rank, self.others = store, rank, [other for other in range(world) if other != rank]
        self._end = threading.Event()

    def run(self) -> None:
        count, seen = 0, dict.fromkeys(self.others, (b"", 0))
        while not self._end.wait(BEAT):
            count += 1
            try:
                self.store.set(str(self.rank), str(count))
                now = {other: self._of(other) for other in self.others}
            except RuntimeError:
                self._die("the rank that holds the group together is gone")
                return
            for other, value in now.items():
                if value != seen[other][0]:
                    seen[other] = value, count
                elif count - seen[other][1] >= BEATS:
                    self._die(f"rank {other} has shown no sign of life for {BEATS * BEAT:g} s")

    def stop(self) -> None:
        """Ends the thread at its next beat; the process lives on."""
        self._end.set()

    def _of(self, other: int) -> bytes:
        key = str(other)
        return self.store.get(key) if self.store.check([key]) else b""

    def _die(self, why: str) -> None:
        if not self._end.is_set():
            end_process(f"rank {self.rank}: {why}; {GOES_ON}")


def end_process(why: str) -> None:
    """Ends this process and the ranks that it started: its main thread may wait for the dead for ever."""
    print(f"lit-dps: error: {why}", file=sys.stderr, flush=True)
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(2)
