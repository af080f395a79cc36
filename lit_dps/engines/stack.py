"""Stack: the networks of many trials as one tensor, trained in lockstep."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_map, tree_map_

from lit_dps.engines.eligible import Functional
from lit_dps.engines.matrix_products import AsProducts
from lit_dps.engines.network_run import NetworkRun
from lit_dps.optim import OURS, rule_of
from lit_dps.optim.delay import KEY
from lit_dps.training.early_check import CHUNK, evaluating

PART = 256  # examples that fill a device: more at a time are no faster, and hold more memory
# Examples at a time up to which convolutions on a GPU are matrix products: 3.6 times as fast as
# cuDNN's groups at 2 examples, 2.1 times at 16 and 1.1 times at 256 (forward and backward, 100
# networks of Simple-CNN, H200, 2026-11-26)
PRODUCTS = 64


def _flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


class _Rows(NamedTuple):
    """What a network brings into a stack: flat tensors (parameters,), hyperparameters (1,), buffers
    by name.

    The untrained parameters are among the buffers. The gradients that wait, shape (delay,
    parameters), stand at the number of their step modulo the delay. In the stack all have the rows
    as first dimension.
    """

    weights: Tensor
    keep: Tensor
    given: dict[str, Tensor]
    state: dict[str, Tensor]
    buffers: dict[str, Tensor]
    waiting: Tensor


class StackedNetworks:
    """Networks of one architecture under one update rule, each with its own weights, mask, rate and
    momentum.

    The networks know nothing of each other and nothing of the stack: `torch.vmap` calls the
    module's own `loss` and `wrongness` over the first dimension of its stacked parameters.

    Args:
        members: The networks, one a row; the first one's module stands for all, its own weights are
            not used.
        part: Examples of a batch that are taken at a time, where it is larger; the gradients of the
            parts are added up.
        products: Examples at a time up to which convolutions are matrix products; by default
            `PRODUCTS` on a GPU.

    Attributes:
        tensors: What each network has of its own, one a row.
    """

    def __init__(
        self, members: Sequence[NetworkRun], part: int = PART, products: int | None = None
    ):
        self.members: list[NetworkRun | None] = list(members)
        self.module, self.rule = members[0].module, rule_of(members[0].optimizer)
        self.part, self.checked = part, CHUNK
        self._shapes = {
            name: p.shape for name, p in self.module.named_parameters() if p.requires_grad
        }
        self._sizes = [shape.numel() for shape in self._shapes.values()]
        self._module = Functional(self.module)
        if products is None:
            products = PRODUCTS if members[0].module.device.type == "cuda" else 0
        self.products = products
        self.tensors = tree_map(lambda *tensors: torch.stack(tensors), *map(self._row_of, members))

    def _row_of(self, member: NetworkRun) -> _Rows:
        parameters, mask, optimizer = (
            dict(member.module.named_parameters()),
            member.mask or {},
            member.optimizer,
        )
        trained = {name: parameters[name].detach() for name in self._shapes}
        others = {name: p.detach() for name, p in parameters.items() if name not in trained}
        state = {name: optimizer.state.get(parameters[name], {}) for name in trained}
        numbers = self.rule.hyperparameters_of(optimizer.param_groups[0])
        given = zip(self.rule.hyperparameters, numbers, strict=True)
        weights = _flat(trained.values())
        return _Rows(
            weights,
            _flat(
                mask[name].to(p) if name in mask else torch.ones_like(p)
                for name, p in trained.items()
            ),
            {name: weights.new_tensor([number]) for name, number in given},
            {
                key: _flat(state[n].get(key, torch.zeros_like(p)) for n, p in trained.items())
                for key in self.rule.state
            },
            {**others, **dict(member.module.named_buffers())},
            self._waiting_of(member, trained),
        )

    def _waiting_of(self, member: NetworkRun, trained: Mapping[str, Tensor]) -> Tensor:
        places = {id(p): i for i, p in enumerate(member.optimizer.param_groups[0]["params"])}
        parameters, saved = (
            dict(member.module.named_parameters()),
            member.optimizer.state.get(KEY, []),
        )
        waiting = _flat(trained.values()).new_zeros(member.delay, sum(self._sizes))
        for step, gradients in enumerate(saved, start=member.steps - len(saved)):
            found = [(t, gradients[places[id(parameters[name])]]) for name, t in trained.items()]
            waiting[step % member.delay] = _flat(
                torch.zeros_like(t) if g is None else g for t, g in found
            )
        return waiting

    @property
    def weights(self) -> Tensor:
        """The trained parameters of each network: shape (rows, parameters)."""
        return self.tensors.weights

    @property
    def live(self) -> list[int]:
        """The rows whose networks are on their way; the others are trained on, and nobody looks at
        them."""
        return [row for row, member in enumerate(self.members) if member is not None]

    def put(self, row: int, member: NetworkRun) -> None:
        """Begins a network in the row of another, or goes on with one that was saved."""
        self.members[row] = member
        tree_map_(lambda ours, theirs: ours[row].copy_(theirs), self.tensors, self._row_of(member))

    def take(self, rows: Sequence[int]) -> None:
        """Goes on with these rows alone, in this order."""
        self.members = [self.members[row] for row in rows]
        self.tensors = tree_map(lambda tensor: tensor[rows], self.tensors)

    def write_back(self, row: int) -> None:
        """Gives the module, optimizer and schedule of a member the state of its row, to be
        saved."""
        member = self.members[row]
        parameters = dict(member.module.named_parameters())
        with torch.no_grad():
            for name, weights in self._split(self.weights[row]).items():
                parameters[name].copy_(weights)
        group = member.optimizer.param_groups[0]
        for key, tensor in self.tensors.state.items():
            for name, part in self._split(tensor[row]).items():
                state = member.optimizer.state[parameters[name]]
                state[key] = part.clone()
                if self.rule.counts:
                    state["step"] = torch.tensor(float(member.steps))
        if member.delay:
            known = range(max(0, member.steps - member.delay), member.steps)
            rows = [
                self._split(self.tensors.waiting[row, step % member.delay].clone())
                for step in known
            ]
            names = {id(parameter): name for name, parameter in parameters.items()}
            member.optimizer.state[KEY] = [
                [part.get(names[id(p)]) for p in group["params"]] for part in rows
            ]
        group["lr"] = member.rate(member.steps)
        if member.schedule is not None:
            member.schedule.last_epoch, member.schedule._last_lr = member.steps, [group["lr"]]
            member.schedule._step_count = member.steps + 1

    def _split(self, flat: Tensor) -> dict[str, Tensor]:
        """Each parameter of flat tensors, shape (parameters,) or (rows, parameters)."""
        parts = zip(self._shapes.items(), flat.split(self._sizes, dim=-1), strict=True)
        return {name: part.view(*part.shape[:-1], *shape) for (name, shape), part in parts}

    def train(self, x: Tensor, y: Tensor, index: Tensor) -> Tensor:
        """Takes optimizer steps on images and classes of the training split.

        Args:
            index: Examples of each step: (steps, batch), the same for all, or (steps, rows, batch).

        Returns:
            The loss of each network at the last step, before its update: shape (rows,).
        """
        weights, keep, given, state, _, waiting = self.tensors
        delay = waiting.shape[1]
        for step, batch in enumerate(index):
            taken = [0 if m is None else m.steps + step for m in self.members]
            rates = [
                0.0 if m is None or t < delay else m.rate(t)
                for m, t in zip(self.members, taken, strict=True)
            ]
            loss, gradients = self.gradients(x, y, batch)
            gradients.mul_(keep)
            if (
                delay
            ):  # those that wait are zero, and the rates with them, until the first one is there
                rows = torch.arange(len(taken), device=weights.device)
                places = torch.tensor([t % delay for t in taken], device=weights.device)
                stale = waiting[rows, places]
                waiting[rows, places] = gradients
                gradients = stale
            updates = weights.new_tensor([[max(t - delay, 0) + 1.0] for t in taken])
            self.rule.update_(
                weights, gradients, state, weights.new_tensor(rates)[:, None], given, updates
            )
            if self.rule not in OURS:  # it may move pruned weights
                weights.mul_(keep)
        return loss

    def gradients(self, x: Tensor, y: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
        """Loss and gradient of each network: shapes (rows,) and (rows, parameters). `batch` as a
        step in `train`.

        Raises torch.OutOfMemoryError if not even one example at a time fits.
        """

        def in_parts() -> tuple[Tensor, Tensor]:
            weights = self.weights.detach().requires_grad_()
            total = 0.0
            for part in batch.split(self.part, dim=-1):
                share = part.shape[-1] / batch.shape[-1]
                with AsProducts() if part.shape[-1] <= self.products else nullcontext():
                    losses = (
                        self._over("loss", weights, self.tensors.buffers, x[part], y[part]) * share
                    )
                losses.sum().backward()
                total = total + losses.detach()
            return total, weights.grad

        return self._fitting(in_parts, "part", batch.shape[-1])

    def wrongness(self, rows: Tensor, x: Tensor, y: Tensor, index: Tensor) -> Tensor:
        """As `Networks.wrongness`. Raises torch.OutOfMemoryError if not even one example at a time
        fits."""
        weights, buffers = (
            self.weights[rows],
            {name: buffer[rows] for name, buffer in self.tensors.buffers.items()},
        )

        def in_parts() -> Tensor:
            parts = index.split(self.checked, 1)
            with evaluating(self.module):
                return torch.cat(
                    [self._over("wrongness", weights, buffers, x[i], y[i]) for i in parts], 1
                )

        return self._fitting(in_parts, "checked", index.shape[1])

    def losses(self, rows: Tensor, x: Tensor, y: Tensor, index: Tensor) -> Tensor:
        """As `Networks.losses`."""
        weights, buffers = (
            self.weights[rows],
            {name: buffer[rows] for name, buffer in self.tensors.buffers.items()},
        )

        def in_parts() -> Tensor:
            with evaluating(self.module):
                parts = (
                    self._over("summed_loss", weights, buffers, x[i], y[i])
                    for i in index.split(self.checked, 1)
                )
                return torch.stack([part.double() for part in parts]).sum(0)

        return self._fitting(in_parts, "checked", index.shape[1])

    def _fitting(
        self, call: Callable[[], Any], limit: Literal["part", "checked"], size: int
    ) -> Any:
        """What a call returns that takes examples in parts of `limit`; it is halved while they need
        too much memory."""
        while True:
            try:
                return call()
            except torch.OutOfMemoryError:
                part = min(getattr(self, limit), size)
                if part == 1:
                    raise
                setattr(self, limit, part // 2)

    def finite(self) -> list[bool]:
        """Whether every weight of each network is finite."""
        return self.weights.isfinite().all(1).tolist()

    def _over(
        self, method: str, weights: Tensor, buffers: Mapping[str, Tensor], x: Tensor, y: Tensor
    ) -> Tensor:
        over_batch = None if y.ndim == 1 else 0
        call = vmap(
            lambda tensors, x, y: self._module.call(method, tensors, (x, y)),
            (0, over_batch, over_batch),
        )
        return call({**self._split(weights), **buffers}, x, y)
