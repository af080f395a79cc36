"""LocalSGDCallback: trains a module by local SGD, all workers in one process or some in each of
several ranks."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch import callbacks as stock
from torch import Tensor

from lit_dps.core.errors import ConfigError
from lit_dps.core.local_sgd import LocalSGDSchedule
from lit_dps.optim.local_sgd import LocalSGD
from lit_dps.parallel import ranks
from lit_dps.parallel.ddp import SharedBatchDDP, whole
from lit_dps.parallel.example_count import can_be_cut
from lit_dps.training.delay_callback import DelayCallback, asks_for_a_closure
from lit_dps.training.example_count import examples_of, examples_of_part, record_batches
from lit_dps.training.local_sgd_batches import KEY, Still, mean_of, part_of
from lit_dps.training.step_count import split_of

_WEIGHTS = (
    stock.WeightAveraging,
    stock.StochasticWeightAveraging,
)  # they look at the network after every step


class LocalSGDCallback(Callback):
    """Trains n networks apart, each on its part of every batch, which meet every H steps
    (`lit_dps.optim.local_sgd`).

    The batch size stays that of a step over all workers: each takes B / n examples, those that the
    rank of its number would take (`lit_dps.parallel.ddp.ShardLoader`). A step is one local step of
    all workers. Schedules, clipping and masks act on each of them. One process trains all workers
    in turn; of several ranks each trains as many, and nothing passes between them but at meetings
    and checks: the same numbers but for rounding.

    Between two steps the module holds one of the workers, whichever, and so does a file of weights
    alone that is saved there; at a check, in a checkpoint of a study and when training has ended,
    it holds their mean (`LocalSGD.show`).

    Args:
        workers: n; 1 is the usual training.
        steps: H, local steps from one meeting to the next.
        start: t0, synchronous steps before the first local one.
        outer_learning_rate: Rate of the outer optimizer; 1 without momentum takes the mean of the
            workers.
        outer_momentum: Its momentum, in [0, 1).
        outer_nesterov: Whether that is Nesterov's.

    Raises:
        ConfigError: for a value out of its range; when training starts or at the first step, for
            what has no meaning or would be another update than on ranks: a module that steps its
            optimizers itself, an optimizer that evaluates the loss itself or keeps state in its
            parameter groups, a batch that n does not divide, accumulated batches, loss scaling,
            stale gradients, measured smoothness, buffers that a training step changes (the running
            statistics of batch normalization would be of all workers' weights mixed), and weights
            that something else than the optimizer moves.
    """

    def __init__(
        self,
        workers: int = 1,
        steps: int = 1,
        start: int = 0,
        outer_learning_rate: float = 1.0,
        outer_momentum: float = 0.0,
        outer_nesterov: bool = True,
    ):
        self.rounds = LocalSGDSchedule(
            workers, steps, start, outer_learning_rate, outer_momentum, outer_nesterov
        )
        self._begin()

    def _begin(self) -> None:
        self._workers: LocalSGD | None = None
        self._saved: dict[str, Any] | None = None
        self._turn: list[int | None] = []  # whose update it is; empty between two steps
        self._losses: list[Tensor] = []
        self._left: list[Tensor] = []  # the weights as the last step or check left them
        self._shown = -1  # the step whose mean the module holds, or held

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":  # a checkpoint is loaded after this
            record_batches(trainer)
            self._begin()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self.rounds.on:
            return
        self._refuse(trainer, pl_module)
        each = self.rounds.workers // ranks.world()
        ours = range(ranks.rank() * each, (ranks.rank() + 1) * each)
        self._workers = LocalSGD(self.rounds, trainer.optimizers[0], ours, ranks.all_reduce_sum)
        if self._saved is not None:
            self._workers.load_state_dict(self._saved)
        self._still = Still(pl_module, trainer.optimizers[0], self.rounds)
        self._take_over(trainer)

    def _refuse(self, trainer: Trainer, module: LightningModule) -> None:
        name, n = type(module).__name__, self.rounds.workers
        if not module.automatic_optimization:
            raise ConfigError(KEY, n, f"1 for {name}, which steps its optimizers itself")
        if asks_for_a_closure(trainer.optimizers[0]):
            kind = type(trainer.optimizers[0]).__name__
            raise ConfigError(KEY, n, f"1 for {kind}, which evaluates the loss itself in a step")
        if n % ranks.world():
            raise ConfigError(
                KEY, n, f"a multiple of the {ranks.world()} ranks that train together"
            )
        if trainer.accumulate_grad_batches != 1:
            raise ConfigError(
                KEY,
                n,
                f"1 with trainer.accumulate_grad_batches = {trainer.accumulate_grad_batches}",
            )
        if getattr(trainer.precision_plugin, "scaler", None) is not None:
            raise ConfigError(
                KEY,
                n,
                f"1 with trainer.precision = {trainer.precision}: it scales one loss for all",
            )
        for callback in trainer.callbacks:
            if isinstance(callback, _WEIGHTS):
                raise ConfigError(
                    KEY,
                    n,
                    f"1 with {type(callback).__name__}, which averages weights after every step",
                )
            if isinstance(callback, DelayCallback) and callback.delay:
                raise ConfigError(
                    KEY,
                    n,
                    f"1 with optim.delay = {callback.delay}: its gradients wait for one network",
                )
            if getattr(callback, "measures_one_network", False):
                raise ConfigError(
                    KEY, n, f"1 with {type(callback).__name__}, which measures along one network"
                )
        loader = whole(trainer.train_dataloader)
        size, examples = split_of(loader)
        last = (
            0
            if not size or examples is None or getattr(loader, "drop_last", False)
            else examples % size
        )
        if last:
            _divides(
                self.rounds, last, "the last batch of an epoch, unless the loader has drop_last"
            )

    def _take_over(self, trainer: Trainer) -> None:
        """Puts the steps of all workers in place of those of the one network, in the strategy's two
        calls."""
        strategy, workers = trainer.strategy, self._workers
        step, train = strategy.optimizer_step, strategy.training_step

        def optimizer_step(optimizer, closure, model=None, **kwargs) -> Any:
            self._still.check_weights(self._left)
            self._losses, result, groups = [], None, _numbers(optimizer)

            def update(worker: int | None) -> None:
                nonlocal result
                self._turn = [worker]
                result = step(optimizer, closure, model, **kwargs)
                self._turn = []
                if _numbers(optimizer) != groups:
                    kind = type(optimizer).__name__
                    raise ConfigError(
                        KEY, self.rounds.workers, f"1 for {kind}, which keeps state in its groups"
                    )

            if workers.apart and isinstance(strategy, SharedBatchDDP):
                strategy.part_ways()
            workers.step(update)
            self._remember()
            if workers.steps == 1:
                self._still.check()
            return result

        def training_step(batch, *args, **kwargs) -> Any:
            name = type(trainer.lightning_module).__name__
            if not self._turn:
                why = f"1 for {name}, which takes its loss outside of a step of its optimizer"
                raise ConfigError(KEY, self.rounds.workers, why)
            output = train(self._part(batch, trainer), *args, **kwargs)
            loss = output.get("loss") if isinstance(output, dict) else output
            if loss is None:
                raise ConfigError(
                    KEY,
                    self.rounds.workers,
                    f"1 for {name}, which leaves out batches without a loss",
                )
            self._losses.append(loss.detach())
            return output

        strategy.optimizer_step, strategy.training_step = optimizer_step, training_step

    def _part(self, batch: Any, trainer: Trainer) -> Any:
        """The part of a batch, or of a rank's part of it, that the worker takes whose turn it
        is."""
        examples, ours = examples_of(trainer, batch), examples_of_part(trainer, batch)
        # A rank without a part of the batch has got an example to take part with.
        ours = 1 if ours == 0 else ours
        if not can_be_cut(batch, ours):
            what = "1, but for batches of tensors that all have the examples in front"
            raise ConfigError(KEY, self.rounds.workers, what)
        _divides(self.rounds, examples, "a training batch")
        (worker,) = self._turn
        each = len(self._workers.ours)
        return batch if worker is None else part_of(batch, worker % each, each, ours)

    def on_train_batch_end(
        self, trainer, pl_module, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if isinstance(outputs, dict) and len(self._losses) > 1:
            outputs["loss"] = mean_of(
                self._losses
            )  # of the whole batch, for whoever comes after this callback

    def show(self) -> None:
        """Gives the module the mean of its workers, on all ranks, until the next step."""
        if self._workers is not None and self._shown != self._workers.steps:
            self._still.check()
            self._workers.show()
            self._remember()
            self._shown = self._workers.steps

    def _remember(self) -> None:
        self._left = [parameter.detach().clone() for parameter in self._workers.parameters]

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.show()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.show()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        for name in ("optimizer_step", "training_step") if self._workers is not None else ():
            trainer.strategy.__dict__.pop(name, None)

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """The weights of a checkpoint are the mean's; those of the workers are in the state of this
        callback."""
        if self._workers is not None:
            self.show()
            means = pl_module.named_parameters(remove_duplicate=False)
            state = checkpoint["state_dict"]
            state.update({name: mean.detach() for name, mean in means if name in state})

    def state_dict(self) -> dict[str, Any]:
        if self._workers is None:
            return {}
        state = self._workers.state_dict()
        of_all_ranks = ranks.all_gather(state["workers"])
        return {
            **state,
            "workers": {worker: own for part in of_all_ranks for worker, own in part.items()},
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved = state_dict or None


def show_mean(trainer: Trainer) -> None:
    """Lets a check that comes now look at the mean of the workers, where a trainer has such
    (`LocalSGD.show`)."""
    for callback in trainer.callbacks:
        if isinstance(callback, LocalSGDCallback):
            callback.show()


def _divides(rounds: LocalSGDSchedule, examples: int, of: str) -> None:
    if examples % rounds.workers:
        raise ConfigError(KEY, rounds.workers, f"a divisor of the {examples} examples of {of}")


def _numbers(optimizer: Any) -> list[dict[str, Any]]:
    """What the groups of an optimizer hold beside parameters, as text."""
    return [
        repr({k: v for k, v in group.items() if k != "params"}) for group in optimizer.param_groups
    ]
