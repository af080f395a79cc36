"""The joint between search and training."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from lit_dps.trial import Trial, TrialResult


class Engine(Protocol):
    """Trains trials. Pulls a new one whenever it has room; yields each result as soon as it is known."""

    def run(self, trials: Iterable[Trial]) -> Iterator[TrialResult]: ...
