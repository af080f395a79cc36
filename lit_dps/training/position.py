"""ResumableLoader: the training loader of a run that can be taken up again at a batch, as if it had not stopped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, IterableDataset

from lit_dps.data.loaders import EndlessLoader
from lit_dps.training.generators import capture, restore


class ResumableLoader(CombinedLoader):
    """Stands around a loader in Lightning's loop, and tells when that is between two batches.

    A position is reached by repeating the pass over the data from the states that the random number generators had
    when it began, without training on what comes. Of an `EndlessLoader` these are indices alone.

    Args:
        loader: The loader; `serves` says which.
        owners: Objects whose generators belong to the position, beside the loader's own.
        between: Called when all of the last batch is done and nothing of the next one has begun.
        position: Where to go on, from an earlier `position()` of a loader alike.
    """

    def __init__(
        self,
        loader: Any,
        owners: tuple[Any, ...] = (),
        between: Callable[[], None] = lambda: None,
        position: dict[str, Any] | None = None,
    ):
        super().__init__(loader, "max_size_cycle")  # as Lightning's own
        self.owners, self.between, self._goal = owners, between, position
        self._now: dict[str, Any] | None = None

    @staticmethod
    def supports(loader: Any) -> bool:
        """Whether a loader gives the same batches from the same states: ours, and a DataLoader that keeps no more."""
        if isinstance(loader, EndlessLoader):
            return True
        return (
            isinstance(loader, DataLoader)
            and not isinstance(loader.dataset, IterableDataset)
            and not loader.persistent_workers
            and not hasattr(loader, "state_dict")  # Lightning takes these up itself
        )

    @property
    def taken(self) -> int:
        """Batches of this pass that were trained on, between two batches."""
        return self._given - self._ahead

    def position(self) -> dict[str, Any]:
        """Where the run stands between two batches: plain numbers and tensors."""
        return {"start": self._start, "first": self._first, "taken": self.taken, "now": capture(*self._keepers)}

    @property
    def _keepers(self) -> tuple[Any, ...]:
        return (*self.owners, self.iterables)

    def __iter__(self) -> ResumableLoader:
        self._begin()
        return self

    def _begin(self) -> None:
        self._start = capture(*self._keepers)
        super().__iter__()
        self._given = self._fetched = 0
        self._ahead = 1 if sized_len(self) is None else 0  # Lightning fetches one ahead to find an end

    def __next__(self) -> tuple[Any, int, int]:
        if self._goal is not None:  # not before: a sampler is told its epoch after the loader was begun
            self._go_on(self._goal)
        if self._given == 0:
            self._first = capture(*self._keepers)  # a sampler draws its order here
        if self._fetched >= self._ahead:
            if self._now is not None:  # not before: what is drawn when training starts was drawn before
                restore(self._now, *self._keepers)
                self._now = None
            self.between()
        batch = super().__next__()
        self._fetched, self._given = self._fetched + 1, self._given + 1
        return batch

    def _go_on(self, position: dict[str, Any]) -> None:
        self._goal, self._now = None, position["now"]
        restore(position["start"], *self._keepers)
        self._begin()
        restore(position["first"], *self._keepers)
        for _ in range(position["taken"]):
            try:
                super().__next__()
            except StopIteration:
                raise ValueError(f"the training data end before batch {position['taken']}") from None
        self._given, self._first = position["taken"], position["first"]
