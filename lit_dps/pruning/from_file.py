"""FromFile: the mask of a checkpoint, and on request its weights."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lit_dps.core.errors import ConfigError
from lit_dps.pruning.mask import Mask
from lit_dps.pruning.network import Network
from lit_dps.pruning.pruner import Pruner

PATH_KEY = "pruning.options.path"
WEIGHTS_KEY = "pruning.options.weights"
SUFFIX = "_mask"  # of masks of torch.nn.utils.prune
SHOWN_NAMES = 3


class MaskFile(NamedTuple):
    """What a file holds.

    Attributes:
        masks: The mask of each parameter by name, bool, on the CPU.
        state: Parameters and buffers of the module by name; None if the file has none.
    """

    masks: dict[str, Tensor]
    state: dict[str, Tensor] | None


class FromFile(Pruner):
    """The mask of a file: all prunable parameters must be in it, with the sparsity of the cell.

    A file is one of three: a checkpoint of Lightning that was trained with `PruningCallback` or
    with `torch.nn.utils.prune`; a checkpoint of a trial of a study; or a dict of masks by
    parameter, as `torch.save` writes it. Its content belongs to the identity of a study, its path
    does not. Parameters that are dense in the file are named in `pruning.exclude`, or are biases
    with `pruning.biases: keep`.

    Args:
        path: The file.
        weights: Whether training also begins with the weights and buffers of the checkpoint. Cells
            of sparsity 0 begin with the initial weights of their point.
    """

    passes = 0

    def __init__(self, path: str, weights: bool = False):
        if not Path(path).is_file():
            raise ConfigError(PATH_KEY, path, "a file with masks")
        self.path = path
        self.weights = weights

    def check_sparsity(self, sparsity: float) -> None:
        masks = read_masks(self.path).masks
        kept = sum(int(mask.sum()) for mask in masks.values())
        total = sum(mask.numel() for mask in masks.values())
        if kept != round(total * (1 - sparsity)):
            allowed = (
                f"{1 - kept / total:.12g}, because {self.path} keeps {kept} of {total} weights"
            )
            raise ConfigError("study.sparsities", sparsity, allowed)

    def mask(self, network: Network, sparsity: float, generator: torch.Generator) -> Mask:
        content = read_masks(self.path)
        shapes = {name: parameter.shape for name, parameter in network.parameters.items()}
        _check_tensors(self.path, content.masks, shapes, "mask")
        self.check_sparsity(sparsity)
        tensors = {}
        for name, parameter in network.parameters.items():
            tensors[name] = content.masks[name].to(parameter.device)
        weights = None
        if self.weights:
            weights = _state_of(self.path, content, network.module)
        return Mask(tensors, weights=weights)


def content_hash(path: str) -> str:
    """Return the SHA-256 of a file, in hexadecimal digits."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def read_masks(path: str) -> MaskFile:
    """Return the content of a file. A file that did not change is read once.

    Raises:
        ConfigError: if it has no masks.
    """
    stat = Path(path).stat()
    return _read(path, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=4)
def _read(path: str, modified: int, size: int) -> MaskFile:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        first_line = str(error).strip().partition("\n")[0]
        allowed = f"a file that torch.load reads with weights_only=True: {first_line}"
        raise ConfigError(PATH_KEY, path, allowed) from error
    masks = None
    state = None
    if isinstance(content, Mapping):
        masks = _masks_in(content)
        state = content.get("state_dict", content.get("module"))
    if not masks:
        allowed = "a checkpoint of a pruned network, or a dict of masks by parameter"
        raise ConfigError(PATH_KEY, path, allowed)
    checked = {}
    for name, mask in masks.items():
        is_binary = isinstance(mask, Tensor) and bool(((mask == 0) | (mask == 1)).all())
        if not is_binary:
            raise ConfigError(PATH_KEY, path, f"masks of 0 and 1; {name} has other values")
        checked[name] = mask.bool()
    return MaskFile(checked, state)


def _masks_in(content: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the masks in a checkpoint or a dict; None if it has none."""
    for name, state in content.get("callbacks", {}).items():
        if name.startswith("PruningCallback") and state.get("mask"):
            return state["mask"]
    if isinstance(content.get("mask"), Mapping):  # of a trial in the interval loop
        return content["mask"]
    tensors = content.get("state_dict", content)
    if not isinstance(tensors, Mapping):
        return None
    of_torch = {}
    for name, tensor in tensors.items():
        if name.endswith(SUFFIX):
            of_torch[name.removesuffix(SUFFIX)] = tensor
    if of_torch:
        return of_torch
    if tensors is content and all(isinstance(tensor, Tensor) for tensor in content.values()):
        return content
    return None


def _state_of(path: str, content: MaskFile, module: nn.Module) -> dict[str, Tensor]:
    """Return the weights and buffers of a checkpoint, which fit a module."""
    if content.state is None:
        raise ConfigError("pruning.options.weights", True, f"false, because {path} has no weights")
    shapes = {name: tensor.shape for name, tensor in module.state_dict().items()}
    state = {}
    for name, tensor in content.state.items():
        if name.endswith(SUFFIX):
            continue
        state[name.removesuffix("_orig")] = tensor
    _check_tensors(path, state, shapes, "weight")
    return state


def _check_tensors(
    path: str, tensors: Mapping[str, Tensor], shapes: Mapping[str, torch.Size], kind: str
) -> None:
    """Raise ConfigError unless the tensors of a file have the names and shapes of the network."""
    missing = [name for name in shapes if name not in tensors]
    unexpected = [name for name in tensors if name not in shapes]
    problem = ""
    if missing:
        problem = f"without a {kind} of {_listed(missing)}"
    elif unexpected:
        problem = f"with a {kind} of {_listed(unexpected)}, which the network does not have"
        if kind == "mask":
            problem = f"with a mask of {_listed(unexpected)}, which is not prunable here"
    else:
        for name, shape in shapes.items():
            if tensors[name].shape != shape:
                problem = f"with {name} of shape {_shape(tensors[name].shape)}, not {_shape(shape)}"
                break
    if problem:
        raise ConfigError(
            PATH_KEY, path, f"a file of masks for this network; this file is {problem}"
        )


def _listed(names: list[str]) -> str:
    """Return the first names in words."""
    text = ", ".join(names[:SHOWN_NAMES])
    if len(names) > SHOWN_NAMES:
        text += f" and {len(names) - SHOWN_NAMES} more"
    return text


def _shape(shape: torch.Size) -> str:
    return " x ".join(map(str, shape)) or "()"
