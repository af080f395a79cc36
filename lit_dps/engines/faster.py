"""Whether trials are faster stacked or one at a time here: a short timing of steps and checks."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from lit_dps.engines.runner import StackedTrial, StackGroup
from lit_dps.engines.stack import Stack
from lit_dps.engines.stackable import optimizer_of
from lit_dps.optim import rule_of
from lit_dps.training.early_check import fewest

EXAMPLES = 64  # of a batch that are timed on a CPU, where both ways cost in proportion beyond it
REPEATS = 2


@dataclass(frozen=True)
class Race:
    """Seconds an optimizer step of one trial, with its share of the checks.

    Attributes:
        alone: One trial at a time.
        stacked: Many in lockstep, over their number.
    """

    alone: float
    stacked: float


def race(lane: StackGroup, runner: StackedTrial, batch_size: int, slots: int, part: int) -> Race:
    """Times both ways on the first examples of the training split and as many as a refusing check looks at.

    Args:
        lane: Where the trials would be trained.
        runner: One of them.
        batch_size: Examples of a batch.
        slots: Trials that would be stacked.
        part: Examples of a batch that they would take at a time.
    """
    goal, cpu = lane.goal.goal, lane.device.type == "cpu"
    examples = min(batch_size, EXAMPLES) if cpu else batch_size
    size = len(lane.validation[1])
    looked = round(size * fewest(goal, size)) if lane.goal.early_reject else size
    checked = min(looked, EXAMPLES) if cpu else looked
    module = copy.deepcopy(lane.module)
    module.on_fit_start()
    optimizer, _ = optimizer_of(module)
    index = torch.arange(examples, device=lane.device)
    validation = [tensor[:checked] for tensor in lane.validation]

    def step() -> None:
        optimizer.zero_grad()
        module.loss((lane.x[index], lane.y[index])).backward()
        optimizer.step()

    def check() -> None:
        with torch.no_grad():
            module.wrongness(validation)

    stack = Stack(lane.module, rule_of(optimizer), [runner.member] * slots, part)
    rates = torch.zeros(1, slots, device=lane.device)
    rows = torch.arange(slots, device=lane.device)
    spread = torch.arange(checked, device=lane.device).expand(slots, -1)
    times = [
        _seconds(step, lane.device),
        _seconds(check, lane.device),
        _seconds(lambda: stack.train(lane.x, lane.y, index[None], rates), lane.device) / slots,
        _seconds(lambda: stack.wrongness(rows, *lane.validation, spread), lane.device) / slots,
    ]
    per_step, per_check = batch_size / examples, looked / checked / goal.check_interval
    return Race(times[0] * per_step + times[1] * per_check, times[2] * per_step + times[3] * per_check)


def _seconds(call: Callable[[], None], device: torch.device) -> float:
    """The least of several times, after a first call that loads what it needs."""
    times = []
    for _ in range(1 + REPEATS):
        begin = time.perf_counter()
        call()
        if device.type != "cpu":
            torch.accelerator.synchronize()
        times.append(time.perf_counter() - begin)
    return min(times[1:])
