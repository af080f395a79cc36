"""Stack: the networks of many trials as one tensor, trained in lockstep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.func import functional_call, vmap

from lit_dps.optim import Rule, update_
from lit_dps.training.early_check import CHUNK


class Member(NamedTuple):
    """What a network brings into a stack.

    Attributes:
        weights: Its trained parameters after pruning, shape (parameters,).
        keep: Their mask, bool, of the same shape.
        momentum: Its momentum.
        buffers: Its buffers and untrained parameters, by name.
    """

    weights: Tensor
    keep: Tensor
    momentum: float
    buffers: Mapping[str, Tensor]


class Stack:
    """Networks of one architecture under one update rule, each with its own weights, mask, rate and momentum.

    The networks know nothing of each other and nothing of the stack: `torch.vmap` calls the module's own `loss` and
    `wrongness` over the first dimension of its stacked parameters.

    Args:
        module: A module of that architecture, on the device; its own weights are not used.
        rule: The update rule.
        members: The networks, one a row.
        part: Examples of a batch that are taken at a time; the gradients of the parts are added up.
    """

    def __init__(self, module: LightningModule, rule: Rule, members: Sequence[Member], part: int):
        self.module, self.rule, self.part, self.checked = module, rule, part, CHUNK
        self._names = {name: p.shape for name, p in module.named_parameters() if p.requires_grad}
        self._sizes = [shape.numel() for shape in self._names.values()]
        self._call = Call(module)
        self.weights = torch.stack([m.weights for m in members]).to(module.device)
        self.keep = torch.stack([m.keep for m in members]).to(self.weights)
        self.momentum = self.weights.new_tensor([[m.momentum] for m in members])
        self.accumulators = torch.zeros_like(self.weights) if rule != "sgd" else None
        self.buffers = {
            name: torch.stack([m.buffers[name] for m in members]).to(module.device) for name in members[0].buffers
        }

    def __len__(self) -> int:
        return len(self.weights)

    def put(self, row: int, member: Member) -> None:
        """Begins a network in the row of another."""
        self.weights[row], self.keep[row], self.momentum[row] = member.weights, member.keep, member.momentum
        if self.accumulators is not None:
            self.accumulators[row] = 0.0
        for name, buffer in self.buffers.items():
            buffer[row] = member.buffers[name]

    def take(self, rows: Tensor) -> None:
        """Goes on with these rows alone, in this order."""
        self.weights, self.keep, self.momentum = self.weights[rows], self.keep[rows], self.momentum[rows]
        if self.accumulators is not None:
            self.accumulators = self.accumulators[rows]
        self.buffers = {name: buffer[rows] for name, buffer in self.buffers.items()}

    def train(self, x: Tensor, y: Tensor, index: Tensor, rates: Tensor) -> Tensor:
        """Takes optimizer steps.

        Args:
            x: Images of the training split.
            y: Their classes.
            index: Examples of each step: (steps, batch), the same for all, or (steps, rows, batch).
            rates: Learning rates, shape (steps, rows).

        Returns:
            The loss of each network at the last step, before its update: shape (rows,).
        """
        self.module.train()
        for batch, rate in zip(index, rates, strict=True):
            loss, gradients = self.gradients(x, y, batch)
            gradients.mul_(self.keep)
            update_(self.rule, self.weights, gradients, self.accumulators, rate[:, None], self.momentum)
        return loss

    def gradients(self, x: Tensor, y: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
        """Loss and gradient of each network: shapes (rows,) and (rows, parameters). `batch` as a step in `train`.

        Raises:
            torch.OutOfMemoryError: if not even one example at a time fits.
        """
        while True:
            try:
                return self._in_parts(x, y, batch)
            except torch.OutOfMemoryError:
                part = min(self.part, batch.shape[-1])
                if part == 1:
                    raise
                self.part = part // 2

    def _in_parts(self, x: Tensor, y: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
        weights = self.weights.detach().requires_grad_()
        total, size = 0.0, batch.shape[-1]
        for part in batch.split(self.part, dim=-1):
            losses = self._over("loss", weights, self.buffers, x[part], y[part]) * (part.shape[-1] / size)
            losses.sum().backward()
            total = total + losses.detach()
        return total, weights.grad

    @torch.no_grad()
    def wrongness(self, rows: Tensor, x: Tensor, y: Tensor, index: Tensor) -> Tensor:
        """How wrong these rows are about examples, as the module says it: of the index's shape (rows, examples).

        Raises:
            torch.OutOfMemoryError: if not even one example at a time fits.
        """
        self.module.eval()
        weights, buffers = self.weights[rows], {name: buffer[rows] for name, buffer in self.buffers.items()}
        while True:
            try:
                parts = index.split(self.checked, 1)
                return torch.cat([self._over("wrongness", weights, buffers, x[i], y[i]) for i in parts], 1)
            except torch.OutOfMemoryError:
                checked = min(self.checked, index.shape[1])
                if checked == 1:
                    raise
                self.checked = checked // 2

    def finite(self) -> Tensor:
        """Whether every weight of each network is finite: bool, shape (rows,)."""
        return self.weights.isfinite().all(1)

    def _over(self, method: str, weights: Tensor, buffers: Mapping[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        shared = y.ndim == 1
        parts = weights.split(self._sizes, dim=1)
        parameters = {
            name: part.unflatten(1, shape) if shape else part.squeeze(1)
            for (name, shape), part in zip(self._names.items(), parts, strict=True)
        }
        over_batch = None if shared else 0
        return vmap(
            lambda tensors, x, y: self._call(method, tensors, (x, y)),
            in_dims=(0, over_batch, over_batch),
        )({**parameters, **buffers}, x, y)


class Call:
    """Calls a method of a module with other parameters and buffers than its own."""

    def __init__(self, module: nn.Module):
        self._wrapped = _Methods(module)

    def __call__(self, method: str, tensors: Mapping[str, Tensor], batch: Any) -> Tensor:
        named = {f"module.{name}": tensor for name, tensor in tensors.items()}
        return functional_call(self._wrapped, named, (method, batch))


class _Methods(nn.Module):
    """`functional_call` calls `forward` alone."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, method: str, batch: Any) -> Tensor:
        return getattr(self.module, method)(batch)
