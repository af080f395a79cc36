"""A bare loop that trains many Simple-CNNs at once, written without lit_dps.

It is the upper bound for a stacked engine on the same device: gather a batch for each network,
forward, backward, mask, momentum update. It has no checks, no schedule and no bookkeeping.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import vmap

from benchmarks.step import now

INTERVAL_STEPS = 16  # steps of a captured graph: the steps between two checks of the paper
IMAGES = 8192  # random images to draw batches from; the values do not change the speed
CLASSES = 10
# Parameters of Simple-CNN on 28 x 28 images, by name. Convolutions are (filters, inputs, 5, 5).
SHAPES: dict[str, tuple[int, ...]] = {
    "weight1": (32, 1, 5, 5),
    "bias1": (32,),
    "weight2": (64, 32, 5, 5),
    "bias2": (64,),
    "weight3": (CLASSES, 1024),
    "bias3": (CLASSES,),
}
# Parameters of a network are padded to a multiple of this number, so that each row is aligned for
# the kernels of tensor cores.
ROW_MULTIPLE = 16
# Multiplications and additions of the layers in a forward pass of one example.
FIRST_LAYER_FLOPS = 2 * 24 * 24 * 25 * 32
OTHER_LAYERS_FLOPS = 2 * (8 * 8 * 25 * 32 * 64 + 1024 * CLASSES)
# A backward pass has two products a layer. The first layer needs no gradient of its input.
FLOPS_PER_EXAMPLE = 2 * FIRST_LAYER_FLOPS + 3 * OTHER_LAYERS_FLOPS

PRODUCTS = "products"  # convolutions as batched matrix products (im2col and baddbmm)
GROUPS = "groups"  # convolutions with a group for each network, by torch.vmap
FLOAT32 = "float32"
TF32 = "TF32"
BF16 = "bf16"
PRECISIONS = (FLOAT32, TF32, BF16)


@dataclass(frozen=True)
class Variant:
    """One way to write the bare loop.

    Attributes:
        convolutions: `PRODUCTS` or `GROUPS`.
        precision: `FLOAT32`, `TF32` or `BF16`.
        is_graph: Whether an interval is captured as a CUDA graph.
    """

    convolutions: str
    precision: str = FLOAT32
    is_graph: bool = False

    def __str__(self) -> str:
        mode = "graph" if self.is_graph else "eager"
        return f"{self.convolutions}, {mode}, {self.precision}"


class BareStack:
    """Networks that train at once, each with its own weights, mask, rate and batches.

    Args:
        networks: Number of networks.
        batch_size: Examples of a step of each network.
        device: "cpu" or "cuda".
        variant: How to compute.

    Attributes:
        weights, keep, velocity: Weights, mask and momentum, each of shape (networks, parameters),
            with padding after the parameters.
        index: Examples of the steps of an interval, shape (steps, networks, batch).
    """

    def __init__(self, networks: int, batch_size: int, device: str, variant: Variant):
        self.networks = networks
        self.variant = variant
        self.device = device
        self.dtype = torch.bfloat16 if variant.precision == BF16 else torch.float32
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(IMAGES, 1, 28, 28, generator=generator)
        labels = torch.randint(CLASSES, (IMAGES,), generator=generator)
        self.images = images.to(device, self.dtype)
        self.labels = labels.to(device)
        sizes = [torch.Size(shape).numel() for shape in SHAPES.values()]
        padding = -sum(sizes) % ROW_MULTIPLE
        row = sum(sizes) + padding
        weights = 0.05 * torch.randn(networks, row, generator=generator)
        keep = torch.rand(networks, row, generator=generator) < 0.5
        self.weights = weights.to(device)
        self.keep = keep.to(self.weights)
        self.velocity = torch.zeros_like(self.weights)
        self.rate = torch.full((networks, 1), 0.01, device=device)
        self.momentum = torch.full((networks, 1), 0.9, device=device)
        self.weights.mul_(self.keep)
        # Views of the weights, as leaves of autograd: an update of the weights updates them too.
        self.leaves: dict[str, Tensor] = {}
        *parts, rest = self.weights.split([*sizes, padding], dim=1)
        self.padding = torch.zeros_like(rest)
        for (name, shape), part in zip(SHAPES.items(), parts, strict=True):
            leaf = part.detach().unflatten(1, shape)
            self.leaves[name] = leaf.requires_grad_()
        self.index = torch.zeros(
            INTERVAL_STEPS, networks, batch_size, dtype=torch.int64, device=device
        )
        self.graph: torch.cuda.CUDAGraph | None = None

    def losses(self, batch: Tensor) -> Tensor:
        """Return the loss of each network on its batch of example numbers, shape (networks,)."""
        x = self.images[batch]
        y = self.labels[batch]
        parameters = {name: leaf.to(self.dtype) for name, leaf in self.leaves.items()}
        if self.variant.convolutions == PRODUCTS:
            logits = logits_by_products(parameters, x)
        else:
            logits = vmap(logits_of_one)(parameters, x)
        flat = F.cross_entropy(logits.float().flatten(0, 1), y.flatten(), reduction="none")
        return flat.view_as(y).mean(1)

    def step(self, batch: Tensor) -> None:
        """Take one optimizer step of all networks."""
        loss = self.losses(batch).sum()
        gradients = torch.autograd.grad(loss, list(self.leaves.values()))
        flat = [each.flatten(1) for each in gradients]
        gradient = torch.cat([*flat, self.padding], dim=1)
        gradient.mul_(self.keep)
        self.velocity.mul_(self.momentum).add_(gradient)
        self.weights.addcmul_(self.velocity, self.rate, value=-1)

    def capture(self) -> None:
        """Capture an interval as a CUDA graph."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            # Libraries allocate their workspaces in the first steps.
            for batch in self.index[:2]:
                self.step(batch)
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            for batch in self.index:
                self.step(batch)

    def train_interval(self) -> None:
        """Draw the batches of an interval and train on them."""
        self.index.random_(IMAGES)
        if self.graph is not None:
            self.graph.replay()
            return
        for batch in self.index:
            self.step(batch)


def logits_by_products(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
    """Return the logits of all networks, shape (networks, batch, classes).

    Args:
        parameters: By name, each with the networks as first dimension.
        x: Images, shape (networks, batch, channels, height, width).
    """
    for layer in ("1", "2"):
        x = _convolve(x, parameters[f"weight{layer}"], parameters[f"bias{layer}"])
        x = _pool_and_relu(x)
    flat = x.flatten(2)
    weight = parameters["weight3"].transpose(1, 2)
    return torch.baddbmm(parameters["bias3"][:, None], flat, weight)


def _convolve(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return the convolutions of all networks as one batched matrix product."""
    networks, filters, channels, size, _ = weight.shape
    windows = x.unfold(3, size, 1).unfold(4, size, 1)
    batch, _, height, width = windows.shape[1:5]
    columns = windows.permute(0, 1, 3, 4, 2, 5, 6)
    columns = columns.reshape(networks, batch * height * width, channels * size * size)
    product = torch.baddbmm(bias[:, None], columns, weight.flatten(2).transpose(1, 2))
    return product.view(networks, batch, height, width, filters).permute(0, 1, 4, 2, 3)


def _pool_and_relu(x: Tensor) -> Tensor:
    return F.relu(F.max_pool2d(x.flatten(0, 1), 2)).unflatten(0, x.shape[:2])


def logits_of_one(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
    """Return the logits of one network, shape (batch, classes)."""
    for layer in ("1", "2"):
        x = F.conv2d(x, parameters[f"weight{layer}"], parameters[f"bias{layer}"])
        x = F.relu(F.max_pool2d(x, 2))
    return F.linear(x.flatten(1), parameters["weight3"], parameters["bias3"])


def bare_rate(
    networks: int, batch_size: int, device: str, variant: Variant, seconds: float
) -> float:
    """Return network-steps a second of the bare loop.

    Args:
        networks, batch_size, device, variant: See `BareStack`.
        seconds: How long to measure, at least; always at least one interval.
    """
    set_tf32(variant.precision == TF32)
    stack = BareStack(networks, batch_size, device, variant)
    if variant.is_graph:
        stack.capture()
        stack.train_interval()
    else:
        stack.step(stack.index[0])
    begin = now(device)
    intervals = 0
    elapsed = 0.0
    while intervals == 0 or elapsed < seconds:
        stack.train_interval()
        intervals += 1
        elapsed = now(device) - begin
    return networks * INTERVAL_STEPS * intervals / elapsed


def set_tf32(is_allowed: bool) -> None:
    """Set whether matrix products and convolutions may round to TF32."""
    torch.backends.cuda.matmul.allow_tf32 = is_allowed
    torch.backends.cudnn.allow_tf32 = is_allowed
