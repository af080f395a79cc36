"""The fused engine: many trials of one batch size, of all sparsities together, trained in lockstep."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass

import torch
from lightning.pytorch import Trainer

from lit_dps.engines.faster import race
from lit_dps.engines.replay import Replay
from lit_dps.engines.room import Room
from lit_dps.engines.runner import StackedTrial, StackGroup
from lit_dps.engines.stack import Stack
from lit_dps.engines.stackable import optimizer_of, why_not
from lit_dps.engines.stacked_check import StackedCheck
from lit_dps.engines.trainer import LightningEngine
from lit_dps.optim import rule_of
from lit_dps.training import GoalErrorCallback
from lit_dps.training.workload import Built
from lit_dps.trial import Trial, TrialResult


def say(text: str) -> None:
    """Prints a line where errors and progress are printed."""
    print(text, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class FusedEngine:
    """Trains stacked trials (`Stack`); those that cannot be stacked, one at a time by another engine.

    Each trial has its own initial weights, mask, rate, momentum, schedule, place in the order of examples, and end. A
    slot whose trial ended is filled by the next one at the same check. Networks, masks, rules, schedules, batches and
    the goal are those of `LightningEngine`; only rounding differs, which training amplifies: a trial's K is another
    draw from the same distribution.

    Attributes:
        one: Who trains one trial at a time; its workload, goal, pruning and limits are this engine's too.
        slots: Trials in a stack; by default as many as memory holds, up to `most`.
        most: See `slots`.
        workers: Processes like this one that share the memory.
        timed: Whether trials are stacked only where a short timing finds that faster.
        say: Takes why trials are not stacked.
    """

    one: LightningEngine
    slots: int | None = None
    most: int | None = None
    workers: int = 1
    timed: bool = False
    say: Callable[[str], None] = say

    def run(self, trials: Iterable[Trial]) -> Iterator[TrialResult]:
        queue, verdicts = _Queue(trials), {}
        while (trial := queue.next()) is not None:
            batch_size = trial.cell.batch_size
            if batch_size not in verdicts:
                reason = self.why_not(trial)
                if reason not in (None, *verdicts.values()):
                    self.say(f"one trial at a time: {reason}")
                verdicts[batch_size] = reason
            if verdicts[batch_size] is None:
                yield from self._race(trial, queue)
            else:
                yield self.one.attempt(trial)

    def why_not(self, trial: Trial) -> str | None:
        """Why this trial and those like it are better not stacked, or None."""
        try:
            built = self._build(trial)
            trainer = Trainer(**built.trainer)
            trainer.datamodule = built.data
            monitor = GoalErrorCallback(**self.one.goal).monitor
            reason = why_not(built, trainer, self.one.smoothness, monitor)
        except Exception as error:  # whatever a user's module does here that it need not do in Lightning
            return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        if reason is not None or not self.timed:
            return reason
        lane, room = self._lane(built)
        slots = self._slots(room)
        found = race(lane, lane.runner(trial, built), room.batch_size, slots, room.part(slots))
        if found.stacked < found.alone:
            return None
        times = f"{found.alone * 1000:.3g} ms alone and {found.stacked * 1000:.3g} ms stacked"
        return f"at B = {room.batch_size} a step takes {times}"

    def _build(self, trial: Trial) -> Built:
        built = self.one.workload.build(trial)
        built.data.trainer = Trainer(**built.trainer)  # other people's setup may ask it
        built.data.prepare_data()
        built.data.setup("fit")
        return built

    def _lane(self, built: Built) -> tuple[StackGroup, Room]:
        goal, device = GoalErrorCallback(**self.one.goal), Trainer(**built.trainer).strategy.root_device
        lane = StackGroup(self.one, goal, built, device)
        return lane, Room.of(lane.module, lane.x, lane.y, built.data.batch_size, self.workers)

    def _slots(self, room: Room) -> int:
        return self.slots or min(room.slots, self.most or room.slots)

    def _race(self, first: Trial, queue: _Queue) -> Iterator[TrialResult]:
        """Runs the first trial and those of the same batch size that follow it in the queue."""
        built = self._build(first)
        lane, room = self._lane(built)
        runners: list[StackedTrial | None] = [lane.runner(first, built)]
        slots = self._slots(room)
        alone: list[Trial] = []

        def another() -> StackedTrial | None:
            while (trial := queue.next_of(first.cell.batch_size)) is not None:
                with suppress(Exception):  # trained alone it is a failed trial
                    built = self._build(trial)
                    if lane.takes(built):
                        return lane.runner(trial, built)
                alone.append(trial)  # another architecture, say
            return None

        while len(runners) < slots and (runner := another()) is not None:
            runners.append(runner)
        rule = rule_of(optimizer_of(built.module)[0])
        stack = Stack(lane.module, rule, [runner.member for runner in runners], room.part(len(runners)))
        check, steps = StackedCheck(*lane.validation, len(runners)), Replay.on(stack)
        while any(runners):
            yield from self._interval(lane, steps, check, runners)
            for row, runner in enumerate(runners):
                if runner is None and (new := another()) is not None:
                    runners[row] = new
                    stack.put(row, new.member)
                    check.forget(row)
            live = [row for row, runner in enumerate(runners) if runner is not None]
            if live:
                self.one.after_check()
            # an empty slot costs as much as a full one, a new shape costs a little
            if 0 < 2 * len(live) <= len(runners):
                rows = torch.tensor(live, device=lane.device)
                stack.take(rows)
                check.take(rows)
                runners = [runners[row] for row in live]
        for trial in alone:
            yield self.one.attempt(trial)

    def _interval(
        self, lane: StackGroup, steps: Replay, check: StackedCheck, runners: list[StackedTrial | None]
    ) -> Iterator[TrialResult]:
        """All steps to the next check, and the check; yields what ended there, and empties its slots."""
        begin = time.perf_counter()
        stack = steps.stack
        losses = steps.train(lane.x, lane.y, lane.batches(runners), lane.rates(runners)).tolist()
        finite = stack.finite().tolist()
        live = [row for row, runner in enumerate(runners) if runner is not None]
        checks = check(stack, live, [lane.allowed(runners[row]) for row in live])
        share = (time.perf_counter() - begin) / len(live)
        found = sorted(zip(live, checks, strict=True), key=lambda pair: pair[1].mistakes)
        for row, answer in found:  # the best first: it may end the others
            runner = runners[row]
            runner.seconds += share
            runner.record(answer, check.size, losses[row], finite[row])
            if runner.run.status is not None:
                runners[row] = None
                yield runner.result()


class _Queue:
    """Trials that are asked for one at a time, when there is room; the first of another kind waits."""

    def __init__(self, trials: Iterable[Trial]):
        self._trials = iter(trials)
        self._waiting: Trial | None = None

    def next(self) -> Trial | None:
        trial, self._waiting = self._waiting, None
        return trial if trial is not None else next(self._trials, None)

    def next_of(self, batch_size: int) -> Trial | None:
        """The next trial, if it has this batch size."""
        self._waiting = self.next()
        if self._waiting is None or self._waiting.cell.batch_size != batch_size:
            return None
        return self.next()
