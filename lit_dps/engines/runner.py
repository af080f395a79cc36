"""StackedTrial: one trial on its way in a stack; StackGroup: what the trials of a stack have in common."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from lit_dps.data.images import ImageData
from lit_dps.data.order import steps
from lit_dps.engines.stack import Call, Member
from lit_dps.engines.stackable import optimizer_of
from lit_dps.engines.trainer import LightningEngine
from lit_dps.optim import rule_of
from lit_dps.pruning import Mask, prunable, take_scores, top_k, worth_knowing
from lit_dps.run import GoalRun
from lit_dps.training import GoalErrorCallback, PruningCallback
from lit_dps.training.early_check import Check
from lit_dps.training.workload import Built
from lit_dps.trial import STACKED, Trial, TrialResult

ALIKE = 64  # examples that tell whether two modules differ in more than their weights


class Stream:
    """The batches of a trial, a check interval at a time; trials that began together may share one."""

    def __init__(self, intervals: Iterator[Tensor]):
        self._intervals = intervals
        self._round, self._batches = -1, None

    def at(self, round: int) -> Tensor:
        """The batches of this round: int64, shape (steps, batch). Rounds come one after another."""
        if round != self._round:
            self._round, self._batches = round, next(self._intervals)
        return self._batches


class StackedTrial:
    """A trial in a stack.

    Attributes:
        member: What its network brings into the stack.
        stream: Its batches.
        rate: Learning rate of the update number `step`, counted from 0.
        run: Its checks so far.
        noted: Of its mask, as in `TrialResult.observed`.
        seconds: Its share of the time.
    """

    def __init__(
        self,
        trial: Trial,
        member: Member,
        mask: Mask | None,
        stream: Stream,
        rate: Callable[[int], float],
        run: GoalRun,
        noted: dict[str, float],
    ):
        self.trial, self.member, self.mask, self.stream, self.rate, self.run = trial, member, mask, stream, rate, run
        self.noted = noted
        self.steps, self.seconds = 0, 0.0

    def record(self, check: Check, size: int, loss: float, finite: bool) -> None:
        """Takes in the check at the end of an interval."""
        self.steps += self.run.goal.check_interval
        self.run.record(self.steps, check.error(size), check.exact, loss, finite)

    def result(self) -> TrialResult:
        return TrialResult(
            trial=self.trial,
            status=self.run.status,
            steps=self.run.steps_to_result,
            curve=self.run.curve,
            kept=self.mask.kept() if self.mask is not None else {},
            seconds=self.seconds,
            observed={STACKED: 1, **self.noted},
        )


class StackGroup:
    """What the trials of one stack share: data, architecture, goal and check interval.

    Args:
        engine: The engine whose workload, goal and pruning the trials have.
        goal: The goal as configured.
        built: The first of the trials.
        device: Where they are trained.
    """

    def __init__(self, engine: LightningEngine, goal: GoalErrorCallback, built: Built, device: torch.device):
        self.engine, self.goal, self.device, self.data = engine, goal, device, built.data
        self.module = copy.deepcopy(built.module).to(device)
        self.x, self.y = built.data.on_device("train", device)
        self.validation = built.data.on_device("val", device)
        self._round = 0
        self._streams: dict[int, Stream] = {}

    def takes(self, built: Built) -> bool:
        """Whether a trial can be in this stack: with its own weights the first one's module is its module."""
        module = built.module.to(self.device)
        kinds = [
            (rule_of(optimizer_of(m)[0]), {n: (t.shape, t.requires_grad) for n, t in tensors_of(m).items()})
            for m in (module, self.module)
        ]
        if built.data.images is not self.data.images or kinds[0] != kinds[1]:
            return False
        batch = self.x[:ALIKE], self.y[:ALIKE]
        with torch.no_grad():
            return torch.allclose(module.loss(batch), Call(self.module)("loss", tensors_of(module), batch), rtol=1e-4)

    def runner(self, trial: Trial, built: Built) -> StackedTrial:
        """Prunes a trial's network and puts it on its way."""
        begin = time.perf_counter()
        module = built.module.to(self.device)
        mask, noted = self._prune(trial, built)
        trained = {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}
        untrained = {name: p.detach() for name, p in module.named_parameters() if not p.requires_grad}
        keep = [
            torch.ones_like(p, dtype=torch.bool) if mask is None or name not in mask else mask[name].to(self.device)
            for name, p in trained.items()
        ]
        optimizer, scheduler = optimizer_of(module)
        group = optimizer.param_groups[0]
        member = Member(
            torch.cat([p.flatten() for p in trained.values()]),
            torch.cat([k.flatten() for k in keep]),
            group["momentum"],
            {**untrained, **dict(module.named_buffers())},
        )
        limit = partial(self.engine.limit, trial.cell)
        run = GoalRun(self.goal.goal, self.engine.goals, limit, self.goal.early_reject)
        runner = StackedTrial(trial, member, mask, self._stream(built.data), _rate(group["lr"], scheduler), run, noted)
        runner.seconds = time.perf_counter() - begin
        return runner

    def allowed(self, runner: StackedTrial) -> int:
        """The most mistakes that the next check of a trial may find before it stops."""
        size = len(self.validation[1])
        return runner.run.next_goal().allowed(size) if self.goal.early_reject else size

    def batches(self, runners: Sequence[StackedTrial | None]) -> Tensor:
        """The batches of the next interval: (steps, batch) where all have the same, else (steps, rows, batch)."""
        found = [None if runner is None else runner.stream.at(self._round) for runner in runners]
        self._round += 1
        some = next(batches for batches in found if batches is not None)
        if all(batches is None or batches is some for batches in found):
            return some.to(self.device)
        return torch.stack([some if batches is None else batches for batches in found], dim=1).to(self.device)

    def rates(self, runners: Sequence[StackedTrial | None]) -> Tensor:
        """The learning rates of the next interval: shape (steps, rows)."""
        interval = self.goal.goal.check_interval
        rows = [[0.0 if r is None else r.rate(r.steps + i) for r in runners] for i in range(interval)]
        return torch.tensor(rows, dtype=self.x.dtype, device=self.device)

    def _stream(self, data: ImageData) -> Stream:
        interval = self.goal.goal.check_interval
        if data.order == "per_trial" or type(data).epochs is not ImageData.epochs:
            return Stream(steps(data.epochs(), data.batch_size, interval))
        if self._round not in self._streams:  # the same order for all that begin now
            self._streams = {self._round: Stream(steps(data.epochs(), data.batch_size, interval))}
        return self._streams[self._round]

    def _prune(self, trial: Trial, built: Built) -> tuple[Mask | None, dict[str, float]]:
        """As `PruningCallback` does it; also what is worth knowing of the mask."""
        seed = trial.seed_for("prune")
        pruning = PruningCallback(**{**self.engine.pruning, "sparsity": trial.cell.sparsity, "seed": seed})
        if pruning.sparsity == 0:
            return None, {}
        module, data, scores = built.module, built.data, self.engine.scores
        _, taken = scores.of(trial) or ((), None)
        if taken is None:
            module.on_fit_start()
            batches = (
                data.transfer_batch_to_device(b, self.device) for b in data.pruning_dataloader(pruning.batch_size)
            )
            losses = ((module.loss(batch), len(batch[1])) for batch in batches)
            parameters = prunable(module, pruning.biases, pruning.exclude)
            taken = take_scores(pruning.method, parameters, losses, pruning.batch_size, seed)
            scores.keep(trial, (), taken)  # the pass of the data module's own
        mask = top_k(taken, pruning.sparsity)
        mask.apply_to_weights(module)
        return mask, worth_knowing(mask, taken, sum(p.numel() for p in module.parameters() if p.requires_grad))


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _rate(initial: float, scheduler: torch.optim.lr_scheduler.LambdaLR | None) -> Callable[[int], float]:
    if scheduler is None:
        return lambda step: initial
    base, factor = scheduler.base_lrs[0], scheduler.lr_lambdas[0]
    return lambda step: base * factor(step)
