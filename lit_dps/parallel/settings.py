"""The ranks that a trainer's configuration asks for, and the arguments of Lightning's Trainer."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment

from lit_dps.core.errors import ConfigError
from lit_dps.parallel import ranks
from lit_dps.parallel.ddp import SharedBatchDDP

DDP_UNUSED = "ddp_find_unused_parameters_true"
DDP = ("ddp", "ddp_find_unused_parameters_false", DDP_UNUSED)


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
        allowed = "1; on several nodes, start the command by torchrun on each"
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
        raise ConfigError("trainer.num_nodes", nodes, "left out: torchrun defines it")


def on_gpu(trainer: Mapping[str, Any]) -> bool:
    """Return True if a trainer's configuration trains on CUDA GPUs."""
    accelerator = trainer.get("accelerator") or "auto"
    if accelerator == "auto":
        return torch.cuda.is_available()
    return accelerator in ("gpu", "cuda")


def arguments(trainer: Mapping[str, Any]) -> dict[str, Any]:
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
