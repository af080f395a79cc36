"""The time that asking takes, and what is said meanwhile."""

from __future__ import annotations

import sys
import time

from lit_dps.storage.advice_store import AdviceStore

EVERY = 5.0  # seconds: what a kill may forget
WRITING = (
    0.12,
    5.0,
    20.0,
)  # share of the budget that is kept for the answer, and at least and at most so many seconds


class Clock:
    """The time that asking takes, over all runs of the command; stored along the way, for runs that
    are killed.

    Args:
        budget: Seconds.
        store: Where it is stored.
        spent: Seconds that earlier runs took.
        began: When this one began, on the monotonic clock; None is now.

    Attributes:
        kept: Seconds of the budget that are kept for a later stage.
    """

    def __init__(self, budget: float, store: AdviceStore, spent: float, began: float | None = None):
        now = time.monotonic()
        self.budget, self.store, self.before, self.began = (
            budget,
            store,
            spent,
            now if began is None else began,
        )
        self.kept, self._stored = 0.0, now

    @property
    def spent(self) -> float:
        return self.before + time.monotonic() - self.began

    @property
    def left(self) -> float:
        """Seconds until the answer has to be written, or the later stage begins."""
        share, least, most = WRITING
        return self.budget - min(max(share * self.budget, least), most) - self.kept - self.spent

    def keep(self) -> None:
        self._stored = time.monotonic()
        self.store.keep(spent=self.spent)

    def tick(self) -> None:
        """To be called often: stores the time every few seconds."""
        if time.monotonic() > self._stored + EVERY:
            self.keep()


def say(text: str) -> None:
    """Tells whoever waits how it goes on."""
    print(text, file=sys.stderr, flush=True)
