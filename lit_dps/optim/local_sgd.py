"""Local SGD: n workers that each train a network of their own, and go on from a common one after
every H steps.

    each step     x_i <- the usual update, by worker i's own gradient and its own optimizer state
    each round    d = theta - mean_i x_i;   v <- m v + d;   theta <- theta - rate (d + m v);   x_i
    <- theta for all i

theta is where the round began. At rate 1 and m = 0 that is x_i <- mean x_j: local SGD (Stich 2019).
With Nesterov momentum over any inner optimizer it is DiLoCo (Douillard et al. 2023; theta <- theta
- rate v without Nesterov), and with one worker Lookahead (Zhang et al. 2019). Momentum buffers,
  moments and their counts stay the worker's, in all of
them, through every meeting (as in the code of Lin et al. 2020 and OpenDiloco). Masks are zero in
every worker, so that they are in the mean, in d and in v.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lit_dps.core.local_sgd import LocalSGDSchedule

Tensors = list[Tensor]  # of the trained parameters, in the order of the optimizer


class LocalSGD:
    """The workers of one network that this process trains. Their weights and optimizer states take
    its place in turn.

    Args:
        rounds: When they meet, and how they go on.
        optimizer: Of the network; the parameters that it trains are those of the workers.
        ours: The workers of this process; all of them by default.
        add_up: Sum of a tensor over the processes, each of which has some of the workers; the same
            on all.

    Attributes:
        steps: Steps so far, the synchronous ones among them.
    """

    def __init__(
        self,
        rounds: LocalSGDSchedule,
        optimizer: torch.optim.Optimizer,
        ours: Sequence[int] | None = None,
        add_up: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    ):
        self.rounds, self.optimizer, self.add_up, self.steps = rounds, optimizer, add_up, 0
        self.ours = list(range(rounds.workers) if ours is None else ours)
        self.parameters = [
            p for group in optimizer.param_groups for p in group["params"] if p.requires_grad
        ]
        self._weights: list[Tensors] = []  # by worker of ours; none before they part
        self._states: list[dict[Any, Any]] = []
        self._theta: Tensors = []
        self._velocity: Tensors = []

    @property
    def apart(self) -> bool:
        """Whether the next step is a local one."""
        return self.steps >= self.rounds.start

    def step(self, update: Callable[[int | None], Any]) -> None:
        """Takes a step: `update(None)` on the whole batch, or `update(i)` for each worker of ours,
        on its part.

        An update is the usual one, of gradients and optimizer, of the network as it stands.
        """
        if not self.apart:
            update(None)
            self.steps += 1
            return
        if not self._weights:
            self._part()
        for place, worker in enumerate(self.ours):
            self._put(self._weights[place])
            self.optimizer.state = self._states[place]
            update(worker)
            # read back: an optimizer may put new tensors in place
            self._weights[place] = [p.data for p in self.parameters]
        self.steps += 1
        if self.rounds.meet_after(self.steps):
            self._meet()

    def show(self) -> None:
        """Gives the network the mean of the workers as they stand now, wherever in a round; none of
        them moves.

        This is what a check looks at. Right after a meeting it is theta, where all of them stand;
        between two meetings it is a network that nobody trains, which the workers would have to
        talk to each other to know.
        """
        if self._weights:
            met = self.rounds.meet_after(self.steps)  # a mean of equals may round
            self._put([theta.clone() for theta in self._theta] if met else self._mean())

    def _part(self) -> None:
        """All workers begin where the network stands, with a copy of its optimizer state each."""
        self._theta = [p.detach().clone() for p in self.parameters]
        self._velocity = [torch.zeros_like(p) for p in self._theta]
        self._weights = [[p.clone() for p in self._theta] for _ in self.ours]
        self._states = [_copied(self.optimizer.state) for _ in self.ours]

    @torch.no_grad()
    def _meet(self) -> None:
        rate, momentum = self.rounds.outer_learning_rate, self.rounds.outer_momentum
        for i, (theta, velocity, mean) in enumerate(
            zip(self._theta, self._velocity, self._mean(), strict=True)
        ):
            moved, kept = theta - mean, momentum * velocity
            # lerp is exact at a rate of 1: without momentum theta is the mean to the bit
            theta.copy_(torch.lerp(theta, mean, rate))
            if momentum:
                velocity.copy_(kept + moved)
                theta.sub_(momentum * velocity if self.rounds.outer_nesterov else kept, alpha=rate)
            for weights in self._weights:
                weights[i].copy_(theta)

    @torch.no_grad()
    def _mean(self) -> Tensors:
        means = []
        for own in zip(*self._weights, strict=True):
            total = own[0].clone()
            for weights in own[1:]:
                total += weights
            means.append(
                torch.empty_like(total).copy_(self.add_up(total)).div_(self.rounds.workers)
            )
        return means

    def _put(self, tensors: Tensors) -> None:
        for parameter, tensor in zip(self.parameters, tensors, strict=True):
            parameter.data = tensor

    def state_dict(self) -> dict[str, Any]:
        """What is needed to go on to the bit: of our workers, and what all have in common. Tensors
        are no copies."""
        workers, current = {}, self.optimizer.state
        for place, worker in enumerate(self.ours if self._weights else ()):
            self.optimizer.state = self._states[place]
            workers[worker] = {
                "weights": self._weights[place],
                "optimizer": self.optimizer.state_dict()["state"],
            }
        self.optimizer.state = current
        return {
            "steps": self.steps,
            "workers": workers,
            "theta": self._theta,
            "velocity": self._velocity,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a state whose `workers` are ours, or more."""
        self.steps = state["steps"]
        if not state["workers"]:
            return
        groups = self.optimizer.state_dict()["param_groups"]
        self._weights = [self._like(state["workers"][worker]["weights"]) for worker in self.ours]
        self._states = []
        for worker in self.ours:
            self.optimizer.load_state_dict(
                {"state": state["workers"][worker]["optimizer"], "param_groups": groups}
            )
            self._states.append(self.optimizer.state)
        self._theta, self._velocity = self._like(state["theta"]), self._like(state["velocity"])

    def _like(self, tensors: Tensors) -> Tensors:
        """Tensors of a file where, and as, the parameters lie in memory."""
        return [
            torch.empty_like(p.detach()).copy_(t)
            for p, t in zip(self.parameters, tensors, strict=True)
        ]


def _copied(state: dict[Any, Any]) -> dict[Any, Any]:
    """An optimizer's state; its keys are the parameters themselves."""
    return defaultdict(dict, {key: copy.deepcopy(value) for key, value in state.items()})
