"""What a trainer's configuration says of ranks, and the arguments that Lightning's Trainer gets of
it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch.plugins.environments import ClusterEnvironment, LightningEnvironment

from lit_dps.core.errors import ConfigError
from lit_dps.parallel import ranks
from lit_dps.parallel.ddp import SharedBatchDDP

DDP = ("ddp", "ddp_find_unused_parameters_false", "ddp_find_unused_parameters_true")


def ranks_asked(trainer: Mapping[str, Any]) -> int:
    """How many ranks train together under a trainer's configuration, or torchrun has started.

    "auto" devices are one, unless the strategy is DDP: then all GPUs.

    Raises:
        ConfigError: for combinations that do not serve.
    """
    strategy, nodes = trainer.get("strategy") or "auto", trainer.get("num_nodes") or 1
    devices, count = trainer.get("devices", "auto"), _count(trainer)
    if ranks.started_by_torchrun():
        world, local = int(os.environ["WORLD_SIZE"]), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        if devices not in ("auto", None) and count != local:
            shown = devices if _listed(devices) else count
            raise ConfigError(
                "trainer.devices", shown, f"auto, or {local}: as many as torchrun has started here"
            )
        if nodes not in (1, world // local):
            raise ConfigError("trainer.num_nodes", nodes, "left out: torchrun knows")
        count = world
    elif nodes != 1:
        raise ConfigError(
            "trainer.num_nodes", nodes, "1; on several nodes, start the command by torchrun on each"
        )
    if count > 1 and strategy not in ("auto", *DDP):
        raise ConfigError(
            "trainer.strategy", strategy, f"auto or one of {', '.join(DDP)} on {count} devices"
        )
    accelerator = trainer.get("accelerator") or "auto"
    if count > 1 and accelerator not in ("auto", "cpu", "gpu", "cuda"):
        raise ConfigError(
            "trainer.accelerator", accelerator, f"auto, cpu or gpu on {count} devices"
        )
    return count


def on_gpu(trainer: Mapping[str, Any]) -> bool:
    """Whether a trainer's configuration trains on CUDA GPUs."""
    accelerator = trainer.get("accelerator") or "auto"
    return accelerator in ("gpu", "cuda") or (accelerator == "auto" and torch.cuda.is_available())


def arguments(trainer: Mapping[str, Any]) -> dict[str, Any]:
    """A trainer's arguments for the group that this process is in; outside of one, for one device.

    Lightning starts no processes then, and finds no cluster on its own: on Slurm it would take over
    the signals, and load one trial's checkpoint into the next.
    """
    strategy = trainer.get("strategy") or "auto"
    plugins = trainer.get("plugins") or []
    plugins = list(plugins) if isinstance(plugins, (list, tuple)) else [plugins]
    if ranks.world() == 1:
        one = {"num_nodes": 1, "strategy": "auto" if strategy in DDP else strategy}
        if _count(trainer) != 1 or trainer.get("devices", "auto") == "auto":
            one["devices"] = 1
        if not any(isinstance(plugin, ClusterEnvironment) for plugin in plugins):
            plugins.append(LightningEnvironment())
        return {**trainer, **one, "plugins": plugins}
    unused, devices = (
        {"find_unused_parameters": True} if strategy == DDP[2] else {},
        trainer.get("devices", "auto"),
    )
    return {
        **trainer,
        "strategy": SharedBatchDDP(**unused),
        "devices": devices if _listed(devices) else ranks.local_world(),
        "num_nodes": 1,  # nodes may have different numbers of ranks; `Ranks` knows the whole
        "use_distributed_sampler": False,
        "plugins": [plugin for plugin in plugins if not isinstance(plugin, ClusterEnvironment)],
    }


def _count(trainer: Mapping[str, Any]) -> int:
    devices = trainer.get("devices", "auto")
    gpus = torch.cuda.device_count() if on_gpu(trainer) else 0
    if devices in ("auto", None):
        return max(gpus, 1) if trainer.get("strategy") in DDP else 1
    if _listed(devices):
        return len(
            devices if isinstance(devices, (list, tuple)) else [d for d in devices.split(",") if d]
        )
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


def _listed(devices: Any) -> bool:
    return isinstance(devices, (list, tuple)) or (isinstance(devices, str) and "," in devices)
