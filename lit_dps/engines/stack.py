"""Stack: the networks of many trials as one tensor, trained in lockstep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import vmap

from lit_dps.engines.eligible import Call
from lit_dps.engines.member import Member
from lit_dps.optim import Rule, rule_of
from lit_dps.training.early_check import CHUNK, evaluating

PART = 256  # examples that fill a device: more at a time are no faster, and hold more memory


class Stack:
    """Networks of one architecture under one update rule, each with its own weights, mask, rate and momentum.

    The networks know nothing of each other and nothing of the stack: `torch.vmap` calls the module's own `loss` and
    `wrongness` over the first dimension of its stacked parameters.

    Args:
        members: The networks, one a row; the first one's module stands for all, its own weights are not used.
        part: Examples of a batch that are taken at a time, where it is larger; the gradients of the parts are added up.
    """

    def __init__(self, members: Sequence[Member], part: int = PART):
        self.members: list[Member | None] = list(members)
        self.module, self.rule = members[0].module, rule_of(members[0].optimizer)
        self.part, self.checked = part, CHUNK
        self._names = {name: p.shape for name, p in self.module.named_parameters() if p.requires_grad}
        self._sizes = [shape.numel() for shape in self._names.values()]
        self._call = Call(self.module)
        rows = [_Row.of(member, list(self._names), self.rule) for member in members]
        self.weights, self.keep = torch.stack([r.weights for r in rows]), torch.stack([r.keep for r in rows])
        self.given, self.state, self.buffers = (
            {name: torch.stack([row[i][name] for row in rows]) for name in rows[0][i]} for i in (2, 3, 4)
        )

    @property
    def live(self) -> list[int]:
        """The rows whose networks are on their way; the others are trained on, and nobody looks at them."""
        return [row for row, member in enumerate(self.members) if member is not None]

    def put(self, row: int, member: Member) -> None:
        """Begins a network in the row of another, or goes on with one that was saved."""
        self.members[row], new = member, _Row.of(member, list(self._names), self.rule)
        self.weights[row], self.keep[row] = new.weights, new.keep
        for ours, theirs in ((self.given, new.given), (self.state, new.state), (self.buffers, new.buffers)):
            for name, tensor in ours.items():
                tensor[row] = theirs[name]

    def write_back(self, row: int) -> None:
        """Gives the module, optimizer and schedule of a member the state of its row, to be saved."""
        member = self.members[row]
        parameters = dict(member.module.named_parameters())
        with torch.no_grad():
            for name, weights in self._split(self.weights[row]).items():
                parameters[name].copy_(weights)
        group = member.optimizer.param_groups[0]
        for key, tensor in self.state.items():
            for name, part in self._split(tensor[row]).items():
                state = member.optimizer.state[parameters[name]]
                state[key] = part.clone()
                if self.rule.counts:
                    state["step"] = torch.tensor(float(member.steps))
        group["lr"] = member.rate(member.steps)
        if member.schedule is not None:
            member.schedule.last_epoch, member.schedule._last_lr = member.steps, [group["lr"]]
            member.schedule._step_count = member.steps + 1

    def _split(self, flat: Tensor) -> dict[str, Tensor]:
        parts = flat.split(self._sizes)
        return {name: part.view(shape) for (name, shape), part in zip(self._names.items(), parts, strict=True)}

    def take(self, rows: Sequence[int]) -> None:
        """Goes on with these rows alone, in this order."""
        self.members = [self.members[row] for row in rows]
        self.weights, self.keep = self.weights[rows], self.keep[rows]
        self.given, self.state, self.buffers = (
            {name: tensor[rows] for name, tensor in tensors.items()}
            for tensors in (self.given, self.state, self.buffers)
        )

    def train(self, x: Tensor, y: Tensor, index: Tensor) -> Tensor:
        """Takes optimizer steps.

        Args:
            x: Images of the training split.
            y: Their classes.
            index: Examples of each step: (steps, batch), the same for all, or (steps, rows, batch).

        Returns:
            The loss of each network at the last step, before its update: shape (rows,).
        """
        for step, batch in enumerate(index):
            rates = [[0.0 if m is None else m.rate(m.steps + step)] for m in self.members]
            taken = [[1.0 if m is None else m.steps + step + 1.0] for m in self.members]
            loss, gradients = self.gradients(x, y, batch)
            rates, taken = self.weights.new_tensor(rates), self.weights.new_tensor(taken)
            self.rule.update_(self.weights, gradients.mul_(self.keep), self.state, rates, self.given, taken)
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

    def wrongness(self, rows: Tensor, x: Tensor, y: Tensor, index: Tensor) -> Tensor:
        """How wrong these rows are about examples, as the module says it: of the index's shape (rows, examples).

        Raises:
            torch.OutOfMemoryError: if not even one example at a time fits.
        """
        weights, buffers = self.weights[rows], {name: buffer[rows] for name, buffer in self.buffers.items()}
        while True:
            try:
                parts = index.split(self.checked, 1)
                with evaluating(self.module):
                    return torch.cat([self._over("wrongness", weights, buffers, x[i], y[i]) for i in parts], 1)
            except torch.OutOfMemoryError:
                checked = min(self.checked, index.shape[1])
                if checked == 1:
                    raise
                self.checked = checked // 2

    def finite(self) -> list[bool]:
        """Whether every weight of each network is finite."""
        return self.weights.isfinite().all(1).tolist()

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


class _Row(NamedTuple):
    """What a network brings into a stack: flat tensors (parameters,), hyperparameters (1,), buffers by name.

    The untrained parameters are among the buffers.
    """

    weights: Tensor
    keep: Tensor
    given: dict[str, Tensor]
    state: dict[str, Tensor]
    buffers: dict[str, Tensor]

    @classmethod
    def of(cls, member: Member, names: Sequence[str], rule: Rule) -> _Row:
        parameters, mask = dict(member.module.named_parameters()), member.mask or {}
        trained = {name: parameters[name].detach() for name in names}
        state = {name: member.optimizer.state.get(parameters[name], {}) for name in names}
        others = {name: p.detach() for name, p in parameters.items() if name not in trained}
        weights = torch.cat([p.flatten() for p in trained.values()])
        keep = [mask[name].to(p) if name in mask else torch.ones_like(p) for name, p in trained.items()]
        numbers = rule.hyperparameters_of(member.optimizer.param_groups[0])
        kept = {key: [state[n].get(key, torch.zeros_like(p)) for n, p in trained.items()] for key in rule.state}
        return cls(
            weights,
            torch.cat([k.flatten() for k in keep]),
            {name: weights.new_tensor([number]) for name, number in zip(rule.hyperparameters, numbers, strict=True)},
            {key: torch.cat([part.flatten() for part in parts]) for key, parts in kept.items()},
            {**others, **dict(member.module.named_buffers())},
        )
