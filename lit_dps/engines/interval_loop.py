"""The interval loop: n >= 1 runs, trained from check to check, in place of Lightning's loop.

One network at a time is equal to Lightning's to the bit (`SingleNetwork`). Many in lockstep
(`StackedNetworks`), of one batch size and of all sparsities together, differ by rounding, which
training amplifies: a trial's K is another draw from the same distribution.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from lightning.pytorch import Trainer

from lit_dps.core.attempt import Attempt
from lit_dps.core.trial import (
    INTERVAL_LOOP,
    STACK,
    Status,
    Trial,
    TrialResult,
)
from lit_dps.engines.batching_key import Queue, alike_of
from lit_dps.engines.eligible import ineligibility_reason
from lit_dps.engines.engine import Training
from lit_dps.engines.network_run import NetworkRun
from lit_dps.engines.run_group import RunGroup
from lit_dps.engines.single import SingleNetwork
from lit_dps.engines.stack import StackedNetworks
from lit_dps.engines.trainer import TrainerEngine
from lit_dps.training.checkpoint_files import MIN_SECONDS_WORTH_SAVING
from lit_dps.training.early_check import HardestFirst
from lit_dps.training.rng_state import preserve_rng_state
from lit_dps.training.workload import Built


def say(text: str) -> None:
    """Prints a line where errors and progress are printed."""
    print(text, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class IntervalLoop:
    """Trains the runs that it can (`eligible.why_not`), and leaves the others to Lightning's loop.

    Each run has its own initial weights, mask, rate, momentum, schedule, place in the order of
    examples, and end. A row of a stack whose run ended is filled by the next one at the same check.
    Networks, masks, rules, schedules, batches and the goal are those of `TrainerEngine`.

    Attributes:
        training: What the trials have in common.
        size: Runs that are trained in lockstep, where they are alike; 1 trains one after another.
        say: Takes why runs are not trained in lockstep.
    """

    training: Training
    size: int = 1
    say: Callable[[str], None] = say

    def train(
        self, next_run: Callable[[], Attempt | None], at_check: Callable[[], None] = lambda: None
    ) -> Iterator[TrialResult]:
        queue, sizes, told = Queue(next_run, self.size), {}, set()
        while (run := queue.next()) is not None:
            alike = alike_of(run)
            if (kind := alike[:2]) not in sizes:
                sizes[kind] = self._size_for(run.trial, told)
            if sizes[kind] == 0:
                yield from TrainerEngine(self.training).train(iter([run, None]).__next__, at_check)
            elif sizes[kind] == 1 or not queue.has(alike):
                yield self._alone(run, at_check)
            else:
                yield from self._together(run, queue, at_check)

    def _size_for(self, trial: Trial, told: set[str]) -> int:
        """How many runs like this one are trained together; 0 where Lightning's loop has to train
        them.

        Why they are not trained together is told once, and added to `told`.
        """
        if self.size > 1:
            if (reason := self.ineligibility_reason(trial, side_by_side=True)) is None:
                return self.size
            if reason not in told:
                self.say(f"one trial at a time: {reason}")
            told.add(reason)
        return int(self.ineligibility_reason(trial) is None)

    def ineligibility_reason(self, trial: Trial, side_by_side: bool = False) -> str | None:
        """Why a trial has to be trained by Lightning's loop, or by itself; None if it is trained
        here."""
        if side_by_side and self.training.local_of(trial).rounds.on:
            return "the workers of local SGD take the place of one network in turn"
        try:
            built, _ = self._build(trial)
        except Exception as error:  # told as a failed trial
            return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        return ineligibility_reason(built, self.training, side_by_side)

    def _build(self, trial: Trial) -> tuple[Built, torch.device]:
        """A trial, its data set up, and where it is trained."""
        built = self.training.workload.build(trial)
        trainer = Trainer(**built.trainer)
        built.data.trainer = trainer  # other people's setup may ask it
        built.data.prepare_data()
        built.data.setup("fit")
        return built, trainer.strategy.root_device

    def _alone(self, run: Attempt, at_check: Callable[[], None]) -> TrialResult:
        def train(run: Attempt) -> None:
            with preserve_rng_state(
                seed=run.trial.seed_for("order")
            ):  # what dropout draws, say, is the point's
                built, device = self._build(run.trial)
                group = RunGroup(self.training, built, device, 1)
                member = group.begin(run, built)
                networks, check = SingleNetwork(member), group.checks([member])
                while run.status is None:
                    ((_, *found),) = self._advance(group, networks, check)
                    member.judge(*found)
                    if run.status in (None, Status.PAUSED):
                        self._leave_or_save(networks, check, at_check)
                run.seconds = member.took()
                run.engine = INTERVAL_LOOP
                run.timed = group.watch.timed

        return self.training.attempt(run, train)

    def _together(
        self, first: Attempt, queue: Queue, at_check: Callable[[], None]
    ) -> Iterator[TrialResult]:
        """Trains a run and those alike in the queue."""
        alone: list[Attempt] = []
        with preserve_rng_state():
            built, device = self._build(first.trial)
            group = RunGroup(self.training, built, device, self.size)
            members = [group.begin(first, built)]

            def another() -> NetworkRun | None:
                while (run := queue.next_of(alike_of(first))) is not None:
                    try:
                        built, _ = self._build(run.trial)
                        if group.takes(built):
                            return group.begin(run, built)
                    except Exception:  # trained alone it is a failed trial
                        run.restart()
                    alone.append(run)  # another update rule, say
                return None

            while len(members) < self.size and (member := another()) is not None:
                members.append(member)
            networks, check = StackedNetworks(members), group.checks(members)
            while networks.live:
                try:
                    advanced = self._advance(group, networks, check)
                except Exception:  # of one of them: each alone tells whose it is
                    for row in networks.live:
                        networks.members[row].run.restart()
                        alone.append(networks.members[row].run)
                    break
                for row, *found in advanced:  # the best first: it may end the others
                    member = networks.members[row]
                    member.judge(*found)
                    if member.run.status is Status.PAUSED:
                        self._save(networks, check, row, MIN_SECONDS_WORTH_SAVING)
                    if member.run.status is not None:
                        member.run.seconds, networks.members[row] = member.took(), None
                        member.run.engine = STACK
                        yield member.run.result()
                for row in sorted({*range(len(networks.members))} - {*networks.live}):
                    if (new := another()) is None:
                        break
                    networks.put(row, new)
                    check.begin(row, new.priority)
                # an empty row costs as much as a full one, a new shape costs a little
                if 0 < 2 * len(networks.live) <= len(networks.members):
                    check.take(torch.tensor(networks.live, device=device))
                    networks.take(networks.live)
                if networks.live:
                    self._leave_or_save(networks, check, at_check)
        for run in alone:
            yield self._alone(run, at_check)

    def _advance(
        self, group: RunGroup, networks: SingleNetwork | StackedNetworks, check: HardestFirst
    ) -> list[tuple]:
        """All steps to the next check, and it. Returns (row, error, exact, loss, finite, metrics),
        the best first."""
        group.watch.switch_to("training")
        losses = networks.train(group.x, group.y, group.index(networks.members)).tolist()
        group.watch.switch_to("checking")  # the device is done: it has told the losses
        finite, found = networks.finite(), group.check(networks, check)
        metrics = group.metrics(networks) if self.training.metrics else [{}] * len(found)
        group.watch.add_check(group.interval)
        rows = sorted(
            zip(networks.live, found, metrics, strict=True), key=lambda row: row[1].mistakes
        )
        return [
            (r, answer.error(check.size), answer.exact, losses[r], finite[r], kept)
            for r, answer, kept in rows
        ]

    def _leave_or_save(
        self,
        networks: SingleNetwork | StackedNetworks,
        check: HardestFirst,
        at_check: Callable[[], None],
    ) -> None:
        """Between two intervals: saves what was not saved for long, or all of it where the process
        has to leave."""
        try:
            at_check()
        except BaseException as left:
            for row in networks.live if not getattr(left, "now", False) else ():
                self._save(networks, check, row, MIN_SECONDS_WORTH_SAVING)
            raise
        for row in networks.live:
            pauses = networks.members[row].run.status is not None
            self._save(networks, check, row, MIN_SECONDS_WORTH_SAVING if pauses else math.inf)

    def _save(
        self,
        networks: SingleNetwork | StackedNetworks,
        check: HardestFirst,
        row: int,
        seconds: float,
    ) -> None:
        """Saves a run that has trained for so many seconds, or as long as is allowed between two
        files."""
        member = networks.members[row]
        if member.file is None:
            return
        if time.monotonic() - member.saved >= min(seconds, self.training.checkpoints.seconds):
            networks.write_back(row)
            member.save(check.priority[row])
