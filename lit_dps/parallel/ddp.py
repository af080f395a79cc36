"""SharedBatchDDP: Lightning's DDP on parts of one global batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from lightning.pytorch.plugins.environments import ClusterEnvironment
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor
from torch.distributed import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils._pytree import tree_leaves

from lit_dps.core.errors import ConfigError
from lit_dps.parallel import ranks
from lit_dps.parallel.example_count import can_be_cut, counted, cut


class ShardLoader:
    """This rank's part of every batch of a loader that is the same on all ranks.

    A rank without a part of a training batch gets the batch's first example, at a share of 0: it
    has to take part in adding up the gradients. In evaluation such a batch is left out, and nothing
    is padded.

    Args:
        whole: The loader. What it draws from torch's global generator is the same on all ranks.
        shares: Takes the share of each training batch, by index, that this rank's part is; None for
            evaluation.

    Attributes:
        seen: Examples of this rank's parts since the last pass began.
        counts: The examples of each batch of this pass so far, and of this rank's part.

    Raises:
        ConfigError: for batches that cannot be cut (`can_be_cut`), or that are not the same on all
            ranks.
    """

    def __init__(self, whole: Iterable[Any], shares: dict[int, float] | None = None):
        self.whole, self.shares, self.seen = whole, shares, 0
        self.counts: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return len(self.whole)  # TypeError where that one has no length, as Lightning expects

    def __iter__(self) -> Iterator[Any]:
        self.seen, training = 0, self.shares is not None
        self.counts = []
        if training:
            self.shares.clear()
            # dropout draws differently on parts of different size; the next order must not depend
            # on it
            torch.set_rng_state(ranks.broadcast(torch.get_rng_state()))
        for i, (batch, n) in enumerate(counted(self.whole)):
            refuse_uncut(batch, n)
            mine = ranks.shard(n, turn=0 if training else i)
            size = mine.stop - mine.start
            if training:
                if i == 0:
                    _check_same(batch)
                self.shares[i] = size / n
            elif not size:
                continue
            self.counts.append((n, size))
            if not size:
                mine, size = slice(0, 1), 1
            self.seen += size
            yield cut(batch, mine)


def whole(loader: Any) -> Any:
    """The loader of whole batches."""
    return loader.whole if isinstance(loader, ShardLoader) else loader


def refuse_uncut(batch: Any, examples: int | None) -> None:
    """Raise ConfigError for a batch whose examples cannot be divided among ranks."""
    if not can_be_cut(batch, examples):
        what = "left out: ddp needs tensors that all have the examples as first dimension"
        raise ConfigError("trainer.strategy", "ddp", what)


def _check_same(batch: Any) -> None:
    sums = [float(leaf.double().sum()) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    if len(set(ranks.all_gather(repr(sums)))) > 1:
        same = (
            "left out, unless the train dataloader is the same on all ranks: its order may come "
            "only from torch's generator"
        )
        raise ConfigError("trainer.strategy", "ddp", same)


class Ranks(ClusterEnvironment):
    """Tells Lightning of the group that is there already."""

    creates_processes_externally = True
    main_address, main_port = "", 0

    world_size = staticmethod(ranks.world)
    global_rank = staticmethod(ranks.rank)
    local_rank = staticmethod(ranks.local_rank)

    @staticmethod
    def detect() -> bool:
        return False

    def node_rank(self) -> int:
        return ranks.rank() // ranks.local_world()

    def set_world_size(self, size: int) -> None:
        pass

    def set_global_rank(self, rank: int) -> None:
        pass


class SharedBatchDDP(DDPStrategy):
    """Every rank takes its part of the same batch, and all make the update of one process on the
    whole batch.

    The loss of a module is the mean over its examples. A rank's loss weighs as much as its part of
    the batch, so that the sum of the ranks' gradients is the gradient of the mean over the batch,
    however it is divided.

    It works in a group that was joined before (`lit_dps.parallel.launch.joined`).

    Attributes:
        share: The share of the current training batch that is this rank's part: 0 to 1.
    """

    def __init__(self, **arguments: Any):
        super().__init__(cluster_environment=Ranks(), **arguments)
        self.share = 1.0
        self._apart = False
        self._shares: dict[int, float] = {}
        self._read: Callable[[GradBucket], None] | None = None

    def setup_distributed(self) -> None:
        # not Lightning's: it seeds anew, and the ranks would draw something else than one process
        self.set_world_ranks()

    def set_world_ranks(self) -> None:
        rank_zero_only.rank = ranks.rank()

    def configure_ddp(self) -> None:
        pass  # not yet

    def on_train_start(self) -> None:
        """Wraps the module. Lightning does so before the hooks that may change the layout of its
        weights.

        DDP then puts the first gradients back in another order than it took them (torch 2.15).
        """
        super().configure_ddp()
        if self._read is not None:
            self.model.register_comm_hook(self._read, _read_and_add_up)

    def process_dataloader(self, dataloader: Any) -> ShardLoader:
        return ShardLoader(
            dataloader, self._shares if self.lightning_module.trainer.training else None
        )

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if not isinstance(self.lightning_module.trainer.train_dataloader, ShardLoader):
            raise ConfigError("trainer.strategy", "ddp", "left out: ddp needs one train dataloader")
        self.share = self._shares.pop(batch_idx)

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        # DDP takes the mean over the ranks
        weight = 1.0 if self._apart else self.share * ranks.world()
        return super().backward(closure_loss * weight, optimizer, *args, **kwargs)

    def part_ways(self) -> None:
        """From now on each rank makes updates of its own, by the mean loss of what it takes: local
        SGD."""
        self._apart = True
        self.model.require_backward_grad_sync = False  # as DDP's no_sync, for good

    def on_validation_start(self) -> None:
        self.share_buffers()

    def share_buffers(self) -> None:
        """Gives all ranks the first one's buffers, running statistics say: each has seen its own
        examples."""
        for buffer in self.lightning_module.buffers():
            torch.distributed.broadcast(buffer, src=0)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        # not by way of DDP: it would share the buffers at every batch, and ranks may have different
        # numbers of them
        with self.precision_plugin.val_step_context():
            return self.lightning_module.validation_step(*args, **kwargs)

    def mean_over_examples(self, value: float | None) -> float | None:
        """The mean of a value over all validation examples, from its mean over each rank's; None
        without examples.

        A value that is the mean over all already stays so.
        """
        seen = sum(
            loader.seen for loader in tree_leaves(self.lightning_module.trainer.val_dataloaders)
        )
        of_all_ranks = [(v, n) for v, n in ranks.all_gather((value, seen)) if v is not None and n]
        if len({v for v, _ in of_all_ranks}) <= 1:
            return of_all_ranks[0][0] if of_all_ranks else value
        return sum(v * n for v, n in of_all_ranks) / sum(n for _, n in of_all_ranks)

    def watch(self, read: Callable[[GradBucket], None]) -> None:
        """Calls `read` with every bucket of this rank's gradients before they are added up.

        They are those of `share` times the number of ranks times this rank's loss. To be called
        before training starts, in a callback's `on_train_start` at the latest.
        """
        self._read = read

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Writes a file, on rank 0; what goes wrong there is raised on all ranks."""
        write = partial(
            self.checkpoint_io.save_checkpoint,
            checkpoint,
            filepath,
            storage_options=storage_options,
        )
        ranks.on_rank_zero(write, Exception)

    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """What is in a file, for all ranks: rank 0 alone has to reach it."""
        return ranks.on_rank_zero(
            partial(super().load_checkpoint, checkpoint_path, weights_only), Exception
        )

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        ranks.all_reduce_sum(torch.zeros(1))

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return ranks.all_gather(obj)[src]


def _read_and_add_up(read, bucket):  # DDP refuses annotations that are strings
    read(bucket)
    return allreduce_hook(None, bucket)
