"""Loads measurements of the authors' TensorFlow code (github.com/namhoonlee/effect-dps-public) into
our networks."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.parity.condense import KEPT, restored

SHARED = Path(os.environ.get("LIT_DPS_SHARED", Path(__file__).parents[3] / "shared"))
RECORDINGS = (
    SHARED / "reference" / "authors"
)  # in full; what the tests compare with comes with them
REFERENCE = RECORDINGS if RECORDINGS.is_dir() else KEPT
DATA = Path(os.environ.get("LIT_DPS_DATA", SHARED / "data"))

needs_data = pytest.mark.skipif(
    not DATA.is_dir(),
    reason="the real data sets are not on this machine (LIT_DPS_DATA names their folder)",
)


def load(name: str) -> dict[str, np.ndarray]:
    """The arrays of one recording: as recorded where that is on this machine, else as condensed."""
    if REFERENCE == KEPT:
        return restored(name)
    with np.load(REFERENCE / f"{name}.npz") as arrays:
        return dict(arrays)


def layers(network: nn.Module) -> list[nn.Module]:
    """The layers with weights, in the authors' numbering w1, w2, ..."""
    return [module for module in network.modules() if isinstance(module, (nn.Conv2d, nn.Linear))]


def to_torch(array: np.ndarray, layer: nn.Module, part: str) -> Tensor:
    """A TensorFlow tensor in torch's layout: kernels are height x width x in x out, dense in x out.

    Simple-CNN flattens height x width x channel there and channel x height x width here.
    """
    tensor = torch.from_numpy(array)
    if part == "b":
        return tensor
    if isinstance(layer, nn.Conv2d):
        return tensor.permute(3, 2, 0, 1).contiguous()
    if layer.in_features == 1024:
        tensor = tensor.view(4, 4, 64, -1).permute(2, 0, 1, 3).reshape(1024, -1)
    return tensor.T.contiguous()


def tensors(
    network: nn.Module, arrays: dict[str, np.ndarray], prefix: str, root: str = ""
) -> dict[str, Tensor]:
    """Parameter name -> the tensor that the arrays `prefix_w1`, `prefix_b1`, ... hold for it."""
    names = {id(parameter): root + name for name, parameter in network.named_parameters()}
    found = {}
    for i, layer in enumerate(layers(network), start=1):
        for part, parameter in (("w", layer.weight), ("b", layer.bias)):
            found[names[id(parameter)]] = to_torch(arrays[f"{prefix}_{part}{i}"], layer, part)
    return found


def with_weights(
    network: nn.Module, arrays: dict[str, np.ndarray], prefix: str = "w0"
) -> nn.Module:
    """The network with the authors' weights."""
    network.load_state_dict(tensors(network, arrays, prefix))
    return network
