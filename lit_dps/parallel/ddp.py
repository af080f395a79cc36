"""SharedBatchDDP: Lightning's DDP on parts of one global batch; which ranks a study asks for.

`ranks_asked` reads the number of ranks from the arguments of Lightning's Trainer, and
`trainer_arguments` returns the arguments that a fit on these ranks gets.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor
from torch.distributed import GradBucket  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from lit_dps.core.errors import ConfigError
from lit_dps.core.trial import derive_seed
from lit_dps.parallel import ranks
from lit_dps.parallel.example_count import DIVISIBLE, can_be_cut, counted, cut

DDP_UNUSED = "ddp_find_unused_parameters_true"
DDP = ("ddp", "ddp_find_unused_parameters_false", DDP_UNUSED)


class ShardLoader:
    """Yields this rank's part of every batch of a loader that is the same on all ranks.

    A training batch may have fewer examples than there are ranks. A rank without a part then yields
    the first example with a share of 0, because it must take part in the reduction of gradients.
    In evaluation such a rank skips the batch. No batch is padded.

    Args:
        loader: The loader of whole batches. What it draws from torch's global generator is the
            same on all ranks.
        shares: Receives, for each training batch by its index, the share of its examples that this
            rank has; None for evaluation.

    Attributes:
        examples_seen: Examples of this rank's parts since the last pass began.
        counts: For each batch of this pass so far: its examples, and those of this rank's part.

    Raises:
        ConfigError: for batches that cannot be cut (`can_be_cut`), or that differ among the ranks.
    """

    def __init__(self, loader: Iterable[Any], shares: dict[int, float] | None = None):
        self.loader = loader
        self.shares = shares
        self.examples_seen = 0
        self.counts: list[tuple[int, int]] = []

    def __len__(self) -> int:
        # Lightning expects the TypeError of a loader without a length.
        return len(cast(Sized, self.loader))

    def __iter__(self) -> Iterator[Any]:
        self.examples_seen = 0
        self.counts = []
        # A validation step may draw differently on parts of different size. The order of the
        # examples must not depend on it.
        torch.set_rng_state(ranks.broadcast(torch.get_rng_state()))
        if self.shares is None:
            yield from self._evaluation_parts()
            return
        self.shares.clear()
        yield from self._training_parts(self.shares)

    def _training_parts(self, shares: dict[int, float]) -> Iterator[Any]:
        for number, (batch, examples) in enumerate(counted(self.loader)):
            examples = require_divisible(batch, examples)
            if number == 0:
                _require_same_on_all_ranks(batch)
            part = ranks.shard(examples)
            size = part.stop - part.start
            shares[number] = size / examples
            self.counts.append((examples, size))
            if size == 0:
                part = slice(0, 1)
            self.examples_seen += max(size, 1)
            yield cut(batch, part)

    def _evaluation_parts(self) -> Iterator[Any]:
        for number, (batch, examples) in enumerate(counted(self.loader)):
            examples = require_divisible(batch, examples)
            if number == 0:
                _require_same_on_all_ranks(batch)
            part = ranks.shard(examples, turn=number)
            size = part.stop - part.start
            if size == 0:
                continue
            self.counts.append((examples, size))
            self.examples_seen += size
            yield cut(batch, part)


def unsharded(loader: Any) -> Any:
    """Return the loader of whole batches: the loader in a `ShardLoader`, else the loader itself."""
    if isinstance(loader, ShardLoader):
        return loader.loader
    return loader


def require_divisible(batch: Any, examples: int | None) -> int:
    """Return the number of examples of a batch that can be divided among ranks.

    Raises:
        ConfigError: if the batch cannot be divided (`can_be_cut`).
    """
    if examples is None or not can_be_cut(batch, examples):
        raise ConfigError("trainer.strategy", "ddp", f"omitted. ddp needs {DIVISIBLE}")
    return examples


def _require_same_on_all_ranks(batch: Any) -> None:
    """Raise ConfigError if the sums of a batch's tensors differ among the ranks."""
    sums = []
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor):
            sums.append(float(leaf.double().sum()))
    if len(set(ranks.all_gather(repr(sums)))) > 1:
        allowed = (
            "omitted, unless each dataloader is the same on all ranks. Its order may depend only "
            "on torch's generator"
        )
        raise ConfigError("trainer.strategy", "ddp", allowed)


class ExistingGroup(LightningEnvironment):
    """The cluster environment of a process group that exists before the trainer."""

    @property
    def creates_processes_externally(self) -> bool:
        return True

    def world_size(self) -> int:
        return ranks.world()

    def global_rank(self) -> int:
        return ranks.rank()

    def local_rank(self) -> int:
        return ranks.local_rank()

    def node_rank(self) -> int:
        return ranks.rank() // ranks.local_world()

    def teardown(self) -> None:
        pass  # Lightning's method removes torchrun's variables


class SharedBatchDDP(DDPStrategy):
    """Trains each rank on its part of one batch, so that all make the update of the whole batch.

    The loss of a module is the mean over its examples. A rank's loss is weighted by its share of
    the batch. The sum of the ranks' gradients is therefore the gradient of the mean over the batch,
    for any division of the batch.

    Each rank draws its own random numbers in `training_step`, such as dropout. With manual
    optimization all ranks draw the same numbers, because a module may draw whether it updates.

    The process group must exist already (`lit_dps.parallel.launch.joined`).

    Attributes:
        share: This rank's share of the examples of the current training batch: 0 to 1.
    """

    def __init__(self, **arguments: Any):
        super().__init__(cluster_environment=ExistingGroup(), **arguments)
        self.share = 1.0
        self._is_independent = False
        self._shares: dict[int, float] = {}
        self._batch_idx = 0
        self._steps_of_batch = 0
        self._on_bucket: Callable[[GradBucket], None] | None = None

    def setup_distributed(self) -> None:
        # Lightning's method also sets the seed. Then the ranks would draw other numbers than a
        # single process.
        self.set_world_ranks()

    def set_world_ranks(self) -> None:
        rank_zero_only.rank = ranks.rank()

    def configure_ddp(self) -> None:
        pass  # `on_train_start` wraps the module

    def on_train_start(self) -> None:
        """Wrap the module in DDP.

        Lightning wraps it before hooks that may change the memory layout of its weights. DDP then
        returns the first gradients in another order than it received them (torch 2.15).
        """
        super().configure_ddp()
        if self._on_bucket is not None:
            self._wrapped_module().register_comm_hook(self._on_bucket, _observe_and_reduce)

    def process_dataloader(self, dataloader: Any) -> ShardLoader:
        if self._module().trainer.training:
            return ShardLoader(dataloader, self._shares)
        return ShardLoader(dataloader)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if not isinstance(self._module().trainer.train_dataloader, ShardLoader):
            raise ConfigError(
                "trainer.strategy", "ddp", "omitted, because ddp needs exactly one train dataloader"
            )
        self.share = self._shares.pop(batch_idx)
        self._batch_idx = batch_idx
        self._steps_of_batch = 0

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if not self._module().automatic_optimization:
            return super().training_step(*args, **kwargs)
        # The seed depends on the batch alone, so a resumed run draws the same numbers. An optimizer
        # such as LBFGS calls the step several times for a batch.
        self._steps_of_batch += 1
        epoch = self._module().trainer.current_epoch
        batch = f"epoch {epoch}, batch {self._batch_idx}, call {self._steps_of_batch}"
        seed = derive_seed(torch.initial_seed(), f"rank {ranks.rank()}, {batch}")
        with _seeded(seed, self.root_device):
            return super().training_step(*args, **kwargs)

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        weight = 1.0
        if not self._is_independent:
            weight = self.share * ranks.world()  # DDP takes the mean over the ranks
        return super().backward(closure_loss * weight, optimizer, *args, **kwargs)

    def stop_reducing_gradients(self) -> None:
        """Let each rank update its weights by the mean loss of its own examples (local SGD)."""
        self._is_independent = True
        # `DistributedDataParallel.no_sync` does the same for a block.
        self._wrapped_module().require_backward_grad_sync = False

    def on_validation_start(self) -> None:
        self.share_buffers()

    def share_buffers(self) -> None:
        """Copy the buffers of rank 0, such as running statistics, to all ranks."""
        for buffer in self._module().buffers():
            torch.distributed.broadcast(buffer, src=0)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        # DDP's forward would share the buffers at every batch, and ranks may have different numbers
        # of batches.
        with self.precision_plugin.val_step_context():
            return self._module().validation_step(*args, **kwargs)

    def observe_gradients(self, on_bucket: Callable[[GradBucket], None]) -> None:
        """Call `on_bucket` with each bucket of this rank's gradients before their reduction.

        The gradients are those of the rank's loss, times `share` and the number of ranks. Call this
        before training starts, in a callback's `on_train_start` at the latest.
        """
        self._on_bucket = on_bucket

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Write a file on rank 0. Its errors are raised on all ranks."""
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
        """Return the content of a file on all ranks. Only rank 0 reads it."""
        read = partial(super().load_checkpoint, checkpoint_path, weights_only)
        return ranks.on_rank_zero(read, Exception)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        ranks.all_reduce_sum(torch.zeros(1))

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return ranks.all_gather(obj)[src]

    def _module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    def _wrapped_module(self) -> DistributedDataParallel:
        assert isinstance(self.model, DistributedDataParallel)
        return self.model


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed the global generators within the block, and restore their states at its end."""
    numpy_state = np.random.get_state()
    python_state = random.getstate()
    devices = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices):
            torch.default_generator.manual_seed(seed)
            if devices:
                torch.cuda.manual_seed(seed)
            np.random.seed(seed)
            random.seed(seed)
            yield
    finally:
        np.random.set_state(numpy_state)
        random.setstate(python_state)


# DDP refuses a hook whose annotations are strings, as they all are in this module.
def _observe_and_reduce(on_bucket, bucket):
    on_bucket(bucket)
    default_group: Any = None
    return allreduce_hook(default_group, bucket)


def ranks_asked(trainer: Mapping[str, Any]) -> int:
    """Return the number of ranks that train together, by the configuration or by torchrun.

    Devices "auto" mean one device, or all GPUs if the strategy is DDP.

    Raises:
        ConfigError: for a combination that is not supported.
    """
    count = _device_count(trainer)
    nodes = trainer.get("num_nodes") or 1
    if ranks.started_by_torchrun():
        _check_torchrun(trainer, count, nodes)
        count = int(os.environ["WORLD_SIZE"])
    elif nodes != 1:
        allowed = "1. For several nodes, start the command by torchrun on each"
        raise ConfigError("trainer.num_nodes", nodes, allowed)
    if count == 1:
        return 1
    strategy = trainer.get("strategy") or "auto"
    if strategy not in ("auto", *DDP):
        allowed = f"auto or one of {', '.join(DDP)} on {count} devices"
        raise ConfigError("trainer.strategy", strategy, allowed)
    accelerator = trainer.get("accelerator") or "auto"
    if accelerator not in ("auto", "cpu", "gpu", "cuda"):
        allowed = f"auto, cpu or gpu on {count} devices"
        raise ConfigError("trainer.accelerator", accelerator, allowed)
    return count


def _check_torchrun(trainer: Mapping[str, Any], count: int, nodes: int) -> None:
    """Raise ConfigError if a configuration contradicts the processes that torchrun started."""
    devices = trainer.get("devices", "auto")
    world = int(os.environ["WORLD_SIZE"])
    local = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if devices not in ("auto", None) and count != local:
        value = devices if _is_list(devices) else count
        allowed = f"auto, or {local}, the number of ranks that torchrun started here"
        raise ConfigError("trainer.devices", value, allowed)
    if nodes not in (1, world // local):
        raise ConfigError("trainer.num_nodes", nodes, "omitted, because torchrun sets it")


def on_gpu(trainer: Mapping[str, Any]) -> bool:
    """Return True if a trainer's configuration trains on CUDA GPUs."""
    accelerator = trainer.get("accelerator") or "auto"
    if accelerator == "auto":
        return torch.cuda.is_available()
    return accelerator in ("gpu", "cuda")


def names_devices(trainer: Mapping[str, Any]) -> bool:
    """Return True if a trainer's configuration names each device, as in [0, 1] or "0,1"."""
    return _is_list(trainer.get("devices"))


def trainer_arguments(trainer: Mapping[str, Any]) -> dict[str, Any]:
    """Return a trainer's arguments for the group of this process; for one device without a group.

    With these arguments Lightning starts no processes, and looks for no cluster. On Slurm it would
    take over the signals, and load one trial's checkpoint into the next trial.
    """
    plugins = trainer.get("plugins") or []
    if not isinstance(plugins, (list, tuple)):
        plugins = [plugins]
    if ranks.world() == 1:
        return _one_device_arguments(trainer, plugins)
    return _group_arguments(trainer, plugins)


def _group_arguments(trainer: Mapping[str, Any], plugins: Sequence[Any]) -> dict[str, Any]:
    devices = trainer.get("devices", "auto")
    if not _is_list(devices):
        devices = ranks.local_world()
    if trainer.get("strategy") == DDP_UNUSED:
        strategy = SharedBatchDDP(find_unused_parameters=True)
    else:
        strategy = SharedBatchDDP()
    return {
        **trainer,
        "strategy": strategy,
        "devices": devices,
        "num_nodes": 1,  # nodes may have different numbers of ranks; `ExistingGroup` has the total
        "use_distributed_sampler": False,
        "plugins": [plugin for plugin in plugins if not isinstance(plugin, ClusterEnvironment)],
    }


def _one_device_arguments(trainer: Mapping[str, Any], plugins: Sequence[Any]) -> dict[str, Any]:
    strategy = trainer.get("strategy") or "auto"
    if strategy in DDP:
        strategy = "auto"
    arguments = {**trainer, "num_nodes": 1, "strategy": strategy}
    if _device_count(trainer) != 1 or trainer.get("devices", "auto") == "auto":
        arguments["devices"] = 1
    if not any(isinstance(plugin, ClusterEnvironment) for plugin in plugins):
        plugins = [*plugins, LightningEnvironment()]
    return arguments | {"plugins": list(plugins)}


def _device_count(trainer: Mapping[str, Any]) -> int:
    """Return the number of devices that a configuration asks for on this machine."""
    devices = trainer.get("devices", "auto")
    gpus = torch.cuda.device_count() if on_gpu(trainer) else 0
    if devices in ("auto", None):
        if trainer.get("strategy") in DDP:
            return max(gpus, 1)
        return 1
    if isinstance(devices, (list, tuple)):
        return len(devices)
    if _is_list(devices):
        return len([name for name in devices.split(",") if name])
    try:
        count = int(devices)
    except ValueError:
        count = 0
    if count == -1 and gpus:
        return gpus
    if count < 1:
        raise ConfigError("trainer.devices", devices, "auto, or a number of devices")
    if gpus and count > gpus:
        raise ConfigError("trainer.devices", devices, f"at most {gpus}, the GPUs of this machine")
    return count


def _is_list(devices: Any) -> bool:
    """Return True if a configuration names each device: [0, 1] or "0,1"."""
    return isinstance(devices, (list, tuple)) or (isinstance(devices, str) and "," in devices)
