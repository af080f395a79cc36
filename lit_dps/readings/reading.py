"""Reading: a quantity that is measured along a run, one file each; Moment: what it may look at."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Literal, Protocol, Self

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor

from lit_dps.core.errors import ConfigError

When = Literal["check", "step", "end"]
# The key of the configuration that names the readings.
KEY = "study.readings"


class LossPass(Protocol):
    """One pass over the training split: `lit_dps.training.training_pass.TrainingPass`."""

    def batches(self) -> Iterator[tuple[Any, int]]:
        """Yield each batch on the device, with its number of examples."""
        ...

    def loss(self, module: LightningModule, batch: Any, i: int) -> Tensor | None:
        """Return the mean loss of batch number i by a copy of the module; None without a loss."""
        ...


class ReadRun(Protocol):
    """A run that readings look at: its network and its data. Each loop has one.

    Attributes:
        module: The module that is trained.
        data_module: Its data module.
        masks: The mask of each pruned parameter, by name.
        batch_size: The cell's batch size: the most examples of an optimizer step.
        trained: The `id` of each parameter that an optimizer trains.
    """

    @property
    def module(self) -> LightningModule: ...

    @property
    def trained(self) -> set[int]: ...

    @property
    def data_module(self) -> LightningDataModule: ...

    @property
    def masks(self) -> Mapping[str, Tensor]: ...

    @property
    def batch_size(self) -> int: ...

    def copied(self) -> AbstractContextManager[LightningModule]:
        """Yield a copy of the module, and undo all side effects of the block afterwards."""
        ...

    def training_pass(self, batch_size: int, examples: int | None) -> LossPass:
        """Return a fresh pass over the first examples of the training split; None for all."""
        ...

    def validation_batches(self) -> Iterator[Any]:
        """Yield the batches of the whole validation split on the device."""
        ...

    def loss_of(self, module: LightningModule, batch: Any) -> Tensor | None:
        """Return the mean training loss of a batch by a copy of the module, without its hooks."""
        ...


class Moment:
    """What a reading may look at: the network and its data, after an optimizer step.

    A reading may use all of it freely. `module` is a copy of the trained module, and its changes
    are lost. Afterwards the generators, the data and the trainer are as they were before.

    Args:
        reader: Name of the reading.
        step: Optimizer steps so far.
        run: The run.
        stack: Ends the protection of the run after the reading.
        is_short: Whether it is a moment of a dry run.

    Attributes:
        step, is_short: As above. A reading may take fewer examples in a dry run, which only tests
            that it works.
        device: The device of the network.
    """

    def __init__(
        self, reader: str, step: int, run: ReadRun, stack: ExitStack, is_short: bool = False
    ):
        self.step = step
        self.is_short = is_short
        self.device: torch.device = run.module.device
        self._reader = reader
        self._run = run
        self._stack = stack
        self._copy: LightningModule | None = None

    @property
    def module(self) -> LightningModule:
        """A copy of the trained module, made when it is first used.

        Only the parameters that an optimizer trains require a gradient.
        """
        if self._copy is None:
            self._stack.enter_context(_unchanged_weights(self._run.module, self._reader))
            self._copy = self._stack.enter_context(self._run.copied())
            _freeze_untrained(self._copy, self._run)
        return self._copy

    @property
    def data(self) -> LightningDataModule:
        """The data module of the run."""
        assert self.module is not None  # protects the data
        return self._run.data_module

    @property
    def masks(self) -> Mapping[str, Tensor]:
        """A copy of the mask of each pruned parameter by name: true where a weight is kept."""
        return {name: mask.clone() for name, mask in self._run.masks.items()}

    @property
    def batch_size(self) -> int:
        """The cell's batch size: the most examples of an optimizer step."""
        return self._run.batch_size

    def loss_of(self, module: LightningModule, batch: Any) -> Tensor | None:
        """Return the mean training loss of a batch by `module`, without the hooks of a step."""
        return self._run.loss_of(module, batch)

    def losses(
        self, batch_size: int = 1000, examples: int | None = None
    ) -> Iterator[tuple[Tensor, int]]:
        """Yield the mean training loss of each batch of a fresh pass, and its number of examples.

        The losses are those of `module`, in training mode, with gradients.

        Args:
            batch_size: Examples of a batch of the pass.
            examples: The first examples of the training split to take; None for all.
        """
        losses = self._run.training_pass(batch_size, examples)
        for i, (batch, size) in enumerate(losses.batches()):
            loss = losses.loss(self.module, batch, i)
            if loss is not None:
                yield loss, size

    def batches(
        self, batch_size: int = 1000, examples: int | None = None
    ) -> Iterator[tuple[Any, int]]:
        """Yield the batches of a fresh pass on the device, each with its number of examples."""
        assert self.module is not None  # protects the data
        yield from self._run.training_pass(batch_size, examples).batches()

    def validation_batches(self) -> Iterator[Any]:
        """Yield the batches of `val_dataloader`, the whole validation split, on the device.

        With several ranks, each rank has all of them. `module` is in training mode; a reading that
        predicts calls `module.eval()` first.
        """
        assert self.module is not None  # protects the data
        yield from self._run.validation_batches()


def parameters_with_gradient(module: LightningModule) -> dict[str, Tensor]:
    """Return the parameters of `Moment.module` that an optimizer trains, by name."""
    return {name: each for name, each in module.named_parameters() if each.requires_grad}


def _freeze_untrained(twin: LightningModule, run: ReadRun) -> None:
    """Let a copy have gradients of the parameters alone that an optimizer trains.

    A module may give its optimizer a part of its parameters and freeze none.
    """
    copies = dict(twin.named_parameters())
    trained = run.trained  # a property that collects all parameters
    for name, parameter in run.module.named_parameters():
        if id(parameter) not in trained:
            copies[name].requires_grad_(False)


@contextmanager
def _unchanged_weights(module: LightningModule, reader: str) -> Iterator[None]:
    """Raise ConfigError if a reading changes the weights or buffers of the trained module."""
    before = {name: tensor.clone() for name, tensor in _tensors_of(module).items()}
    yield
    for name, tensor in _tensors_of(module).items():
        # The weights were finite before, but a buffer may hold a nan.
        if name not in before or not torch.allclose(
            tensor, before[name], rtol=0, atol=0, equal_nan=True
        ):
            allowed = f"a reading that does not change {name} of the trained module"
            raise ConfigError(KEY, reader, allowed)


def _tensors_of(module: LightningModule) -> dict[str, Tensor]:
    """Return the parameters and buffers of a module, detached."""
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {name: tensor.detach() for name, tensor in tensors.items()}


class Reading(ABC):
    """A quantity that is measured along a run, or at its end.

    With local SGD, a reading at a check or at the end looks at the average of the workers. A
    reading that follows single steps is refused there (`follows_steps`).

    Training does not depend on it. Its random draws depend on the trial, its name and the step
    alone, so that each loop reads the same values. A trial has a reading of its own. Checkpoints
    save its attributes that are numbers, texts, tensors, lists or dicts of them; `state_dict` and
    `load_state_dict` save any other state.

    Attributes:
        name: Name of the reading, unique in a study.
        when: "check" reads at each check, "step" after every `interval` steps, "end" once a trial
            is complete or its budget is spent.
        interval: Steps between two readings of a reading with `when = "step"`.
        stacked: Whether it can be read of a network in a stack. A trial with a reading that
            measures the process, such as its memory, trains alone.
        over_ranks: Whether `read` returns the same numbers on each rank, where several ranks train
            a trial. `Moment.losses` has the batches of one rank there.
        flags: Numbers of the whole trial, stored in `TrialResult.flags`; `start`, `before`,
            `count` and `read` may set them.
    """

    name: str = ""
    when: When = "check"
    interval: int = 1
    stacked: bool = True
    over_ranks: bool = False
    flags: dict[str, float] = {}

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        reading = super().__new__(cls)
        # All trials would share the dict of the class. A subclass may define a property instead.
        if isinstance(cls.flags, Mapping):
            vars(reading)["flags"] = dict(cls.flags)
        return reading

    @property
    def follows_steps(self) -> bool:
        """Whether it looks at single steps, and not only at the network at a check or at the end.

        With local SGD each worker steps a network of its own, which are averaged at a check.
        """
        kind = type(self)
        return (
            self.when == "step"
            or kind.before is not Reading.before
            or kind.count is not Reading.count
            or kind.see_gradients is not Reading.see_gradients
        )

    def start(self, moment: Moment) -> None:  # noqa: B027  # optional
        """Look at the network before the first step, after pruning."""

    def before(self, moment: Moment) -> None:  # noqa: B027  # optional
        """Look at the network before each step that the reading follows."""

    def count(self, rate: float) -> None:  # noqa: B027  # optional
        """Count an optimizer step, with the learning rate of its first group of parameters."""

    def see_gradients(self, gradients: Mapping[str, Tensor]) -> None:  # noqa: B027  # optional
        """Look at the gradients of each step that the reading follows, by parameter.

        They are the gradients that the optimizer steps by: of the whole batch, averaged over the
        ranks, masked, and before clipping.
        """

    @abstractmethod
    def read(self, moment: Moment) -> Mapping[str, float]:
        """Return numbers by column, always for the same columns, at least one."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain numbers, texts, lists, dicts and tensors; empty without one."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that `state_dict` has returned."""
        if state:
            raise NotImplementedError(f"{type(self).__name__}.load_state_dict")


class CurveReading(Reading):
    """A quantity that follows from the curve of a trial, so from what it has spent.

    It is read after each check is recorded, and does not look at the network.

    Attributes:
        counted: Columns of the curve that the trial has to count: "examples" or "seconds".
    """

    over_ranks = True
    counted: tuple[str, ...] = ()

    @abstractmethod
    def read_curve(self, curve: Mapping[str, Sequence[float]]) -> Mapping[str, float]:
        """Return numbers by column from the curve up to the last check."""

    def read(self, moment: Moment) -> Mapping[str, float]:
        raise NotImplementedError(f"{self.name} is read from the curve")


def check_attributes(reading: Reading, class_path: str) -> None:
    """Raise ConfigError unless the attributes of a reading are valid."""
    if not reading.name:
        raise ConfigError(KEY, class_path, "a class that sets its name")
    if reading.when not in ("check", "step", "end"):
        allowed = f"a class whose when is check, step or end, not {reading.when!r}"
        raise ConfigError(KEY, class_path, allowed)
    is_count = isinstance(reading.interval, int) and not isinstance(reading.interval, bool)
    if not is_count or reading.interval < 1:
        allowed = f"a class whose interval is at least 1 step, not {reading.interval!r}"
        raise ConfigError(KEY, class_path, allowed)
