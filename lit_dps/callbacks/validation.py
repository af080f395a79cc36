"""ValidationCount: counts what each check looks at, and holds all of them to the same, entire validation split."""

from __future__ import annotations

from collections import Counter
from typing import Any

from lightning.pytorch import Trainer
from torch.utils._pytree import tree_leaves

from lit_dps.callbacks.examples import examples_in, split_of
from lit_dps.errors import ConfigError
from lit_dps.parallel import parts, ranks


class ValidationCount:
    """The batches and examples of a check, by data loader.

    Attributes:
        batches: Of the check that runs, or ran last.
        examples: Likewise; of a DataLoader what its sampler draws, else the lengths of first tensors.
        uneven: The loaders whose batches differ in size.
        first: Examples of the first check; None before.
    """

    def __init__(self):
        self.first: dict[int, int] | None = None
        self.begin()

    def begin(self) -> None:
        """A check begins."""
        self.batches, self.examples = Counter(), Counter()
        self.uneven: set[int] = set()
        self._sizes: dict[int, int] = {}

    def add(self, batch: Any, loader: int) -> None:
        """A batch of it."""
        size = examples_in(batch) or 1
        self.batches[loader] += 1
        self.examples[loader] += size
        if self._sizes.setdefault(loader, size) != size:
            self.uneven.add(loader)

    def end(self, trainer: Trainer) -> None:
        """The check is done.

        Raises:
            ConfigError: if it was empty, or looked at another number of examples than the first one.
        """
        self._by_samplers(trainer)
        found, name = dict(self.examples), _name(trainer)
        if not found and ranks.world() == 1:  # else another rank may have had them
            raise ConfigError("data", name, "a validation dataloader that gives batches")
        if self.first not in (None, found):
            shown = " and ".join(" + ".join(map(str, counts.values())) for counts in (self.first, found))
            raise ConfigError("data", name, f"the same validation examples at every check, not {shown}")
        self.first = found

    def _by_samplers(self, trainer: Trainer) -> None:
        """Counts as the loaders do that know their examples: a first tensor may have another first dimension."""
        loaders = trainer.val_dataloaders
        for i, loader in enumerate(loaders if isinstance(loaders, (list, tuple)) else [loaders]):
            size, n = split_of(loader)
            if size and n is not None and self.batches[i] == len(loader):
                self.examples[i] = n
                self.uneven.discard(i)
                self.uneven |= {i} if n % size and n > size else set()


def refuse_dropped(trainer: Trainer) -> None:
    """Raises ConfigError if a validation dataloader leaves examples out, by `drop_last`."""
    for loader in map(parts.whole, tree_leaves(trainer.val_dataloaders)):
        size, n = split_of(loader)
        if size and n is not None and getattr(loader, "drop_last", False) and n % size:
            left_out = f"it leaves out {n % size} of {n} examples"
            raise ConfigError("data", _name(trainer), f"a validation dataloader without drop_last: {left_out}")


def _name(trainer: Trainer) -> str:
    return type(trainer.datamodule or trainer.lightning_module).__name__
