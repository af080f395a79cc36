"""Local SGD: each worker trains its own network, and after every H steps all workers are averaged.

    each step     x_i <- the usual update of worker i, by its gradient and its optimizer state
    each round    d = theta - mean_i x_i
                  v <- m v + d
                  theta <- theta - rate (d + m v)
                  x_i <- theta for all i

theta are the weights at the begin of the round. At rate 1 and m = 0, x_i <- mean x_j: local SGD
(Stich 2019). With Nesterov momentum over any inner optimizer it is DiLoCo (Douillard et al. 2023;
theta <- theta - rate v without Nesterov), and with one worker Lookahead (Zhang et al. 2019). Each
worker keeps its momentum buffers, moments and their counts through all rounds (as in the code of
Lin et al. 2020 and OpenDiloco). Pruned weights are zero in every worker, so that they are zero in
the mean, in d and in v.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lit_dps.core.errors import ConfigError
from lit_dps.core.local_sgd import LocalSGDSchedule
from lit_dps.optim.parameter_groups import trained_parameters

Tensors = list[Tensor]  # of the trained parameters, in the order of the optimizer


class LocalSGD:
    """The workers of one network that this process trains.

    One worker after another puts its weights and its optimizer state into the network.

    Args:
        schedule: When the workers are averaged, and by which outer optimizer.
        optimizer: The optimizer of the network. The workers train its parameters.
        ours: The workers of this process; all workers by default.
        add_up: Returns the sum of a tensor over the processes, each of which has some workers.

    Attributes:
        steps: Steps so far, including the synchronous ones.
    """

    def __init__(
        self,
        schedule: LocalSGDSchedule,
        optimizer: torch.optim.Optimizer,
        ours: Sequence[int] | None = None,
        add_up: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    ):
        rule = getattr(optimizer, "rule", None)
        if schedule.on and getattr(rule, "gradient_point", None) is not None:
            name = getattr(rule, "name", "")
            allowed = f"1, because the state of {name} has weights that are not averaged"
            raise ConfigError("local.workers", schedule.workers, allowed)
        self.schedule = schedule
        self.optimizer = optimizer
        self.add_up = add_up
        self.steps = 0
        self.ours = list(range(schedule.workers))
        if ours is not None:
            self.ours = list(ours)
        self.parameters: Tensors = trained_parameters(optimizer)
        # By worker of this process; empty before the first local step.
        self._weights: list[Tensors] = []
        self._states: list[dict[Any, Any]] = []
        self._theta: Tensors = []
        self._velocity: Tensors = []

    @property
    def is_local(self) -> bool:
        """Whether the next step is a local one."""
        return self.steps >= self.schedule.start

    def step(self, update: Callable[[int | None], Any]) -> None:
        """Take a step of all workers.

        Args:
            update: Makes the usual update of the network, with its gradients and optimizer:
                `update(None)` by the entire batch, `update(i)` by worker i's part of the batch.
        """
        if not self.is_local:
            update(None)
            self.steps += 1
            return
        if not self._weights:
            self._separate()
        for place, worker in enumerate(self.ours):
            self._put(self._weights[place])
            self._set_state(self._states[place])
            update(worker)
            # An optimizer may have replaced the tensors.
            self._weights[place] = [parameter.data for parameter in self.parameters]
        self.steps += 1
        if self.schedule.meet_after(self.steps):
            self._average()

    def show(self) -> None:
        """Put the mean of the workers into the network, for a validation; no worker changes.

        At the end of a round it is theta. Within a round, no worker trains this network, and the
        workers would have to communicate to compute it.
        """
        if not self._weights:
            return
        if self.schedule.meet_after(self.steps):
            # All workers are equal, but their mean could differ from them by rounding.
            self._put(_copies(self._theta))
        else:
            self._put(self._mean())

    def _separate(self) -> None:
        """Give each worker the weights of the network and a copy of its optimizer state."""
        self._theta = _copies(self.parameters)
        self._velocity = [torch.zeros_like(theta) for theta in self._theta]
        for _ in self.ours:
            self._weights.append(_copies(self._theta))
            self._states.append(_copy_state(self.optimizer.state))

    @torch.no_grad()
    def _average(self) -> None:
        """End a round: update theta by the outer optimizer, and copy it into all workers."""
        means = self._mean()
        for i, mean in enumerate(means):
            self._update_theta(self._theta[i], self._velocity[i], mean)
            for weights in self._weights:
                weights[i].copy_(self._theta[i])

    def _update_theta(self, theta: Tensor, velocity: Tensor, mean: Tensor) -> None:
        rate, momentum = self.schedule.outer_learning_rate, self.schedule.outer_momentum
        difference = theta - mean
        decayed = momentum * velocity
        # lerp is exact at a rate of 1. So without momentum, theta is the mean to the bit.
        theta.copy_(torch.lerp(theta, mean, rate))
        if not momentum:
            return
        velocity.copy_(decayed + difference)
        if self.schedule.outer_nesterov:
            theta.sub_(momentum * velocity, alpha=rate)
        else:
            theta.sub_(decayed, alpha=rate)

    @torch.no_grad()
    def _mean(self) -> Tensors:
        """Return the mean of each parameter over the workers of all processes."""
        means = []
        for tensors in zip(*self._weights, strict=True):
            total = tensors[0].clone()
            for weights in tensors[1:]:
                total += weights
            mean = torch.empty_like(total).copy_(self.add_up(total))
            means.append(mean.div_(self.schedule.workers))
        return means

    def _put(self, tensors: Tensors) -> None:
        """Let the parameters of the network be these tensors."""
        for parameter, tensor in zip(self.parameters, tensors, strict=True):
            parameter.data = tensor

    def _set_state(self, state: dict[Any, Any]) -> None:
        optimizer: Any = self.optimizer
        optimizer.state = state

    def state_dict(self) -> dict[str, Any]:
        """Return the state of our workers and the common state. Its tensors are no copies."""
        workers = {}
        current = self.optimizer.state
        if self._weights:
            for place, worker in enumerate(self.ours):
                self._set_state(self._states[place])
                workers[worker] = {
                    "weights": self._weights[place],
                    "optimizer": self.optimizer.state_dict()["state"],
                }
        self._set_state(current)
        return {
            "steps": self.steps,
            "workers": workers,
            "theta": self._theta,
            "velocity": self._velocity,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state that contains all of our workers."""
        self.steps = state["steps"]
        workers = state["workers"]
        if not workers:
            return
        groups = self.optimizer.state_dict()["param_groups"]
        self._weights = []
        self._states = []
        for worker in self.ours:
            self._weights.append(self._like_parameters(workers[worker]["weights"]))
            saved = {"state": workers[worker]["optimizer"], "param_groups": groups}
            self.optimizer.load_state_dict(saved)
            self._states.append(self.optimizer.state)
        self._theta = self._like_parameters(state["theta"])
        self._velocity = self._like_parameters(state["velocity"])

    def _like_parameters(self, tensors: Tensors) -> Tensors:
        """Return saved tensors on the device and in the memory layout of the parameters."""
        copies = []
        for parameter, tensor in zip(self.parameters, tensors, strict=True):
            copies.append(torch.empty_like(parameter.detach()).copy_(tensor))
        return copies


def _copies(tensors: Tensors) -> Tensors:
    return [tensor.detach().clone() for tensor in tensors]


def _copy_state(state: dict[Any, Any]) -> dict[Any, Any]:
    """Return a copy of an optimizer's state. Its keys are the parameters themselves."""
    copied: dict[Any, Any] = defaultdict(dict)
    for key, value in state.items():
        copied[key] = copy.deepcopy(value)
    return copied
