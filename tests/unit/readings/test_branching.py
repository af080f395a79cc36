"""Branched training: on a noisy quadratic, whose expected losses and critical batch size are
known."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler, TensorDataset

from lit_dps.advice.branch_run import describe_fork
from lit_dps.core.errors import ConfigError
from lit_dps.readings import BranchCallback
from lit_dps.readings.branching import TOLERANCE, Fork, margins_of
from lit_dps.testing.toy import ToyImages
from lit_dps.training import PruningCallback
from lit_dps.training.branch_batches import batches_of_branch, skipped_batches
from lit_dps.training.stopwatch import Stopwatch
from tests.support.errors import refuses
from tests.support.tiny import Plain, assert_equal, fit, loader, points, weights

N, RATE, BATCH = 50, 0.01, 4
H = torch.arange(1, N + 1, dtype=torch.float64) ** -0.5


class Quadratic(LightningModule):
    """The loss 1/2 sum h w^2, whose gradient has the noise h / B along each coordinate (Zhang et
    al. 2019)."""

    def __init__(self, start: float = 0.5):
        super().__init__()
        self.weight = nn.Parameter(torch.full((N,), start, dtype=torch.float64))

    def training_step(self, batch, batch_idx):
        return (H * self.weight.square()).sum() / 2 + (self.weight * batch[0].mean(0)).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), RATE)


def noise(n: int = 8192) -> DataLoader:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, N, dtype=torch.float64, generator=generator) * H.sqrt()
    return DataLoader(TensorDataset(x - x.mean(0)), BATCH, shuffle=True)


def expected(factors, squares: np.ndarray, stretches: int) -> list[float]:
    """The smoothed expected loss at the end of each branch: E w^2 <- (1 - rate h)^2 E w^2 + rate^2
    h / (k B)."""
    h = H.numpy()
    found = []
    for k in factors:
        own, smooth = squares.copy(), math.nan
        for _ in range(stretches):
            for _ in range(max(factors) // k):
                own = (1 - k * RATE * h) ** 2 * own + (k * RATE) ** 2 * h / (k * BATCH)
            loss = float((h * own).sum() / 2)
            smooth = loss if math.isnan(smooth) else (smooth + loss) / 2
        found.append(smooth)
    return found


@pytest.mark.long
@pytest.mark.parametrize(
    ("start", "steps", "is_limited"),
    [pytest.param(0.5, 2, False, marks=pytest.mark.long), (0.02, 30, True)],
)
def test_branches_of_a_noisy_quadratic_end_where_theory_says(start, steps, is_limited):
    factors, stretches = (1, 2, 4, 8, 16, 32, 64), 3
    callback = BranchCallback([steps], factors, stretches, repetitions=8)
    module = Quadratic(start)
    squares = []
    callback.on_fork = lambda fork: squares.append(module.weight.detach().square().numpy().copy())
    torch.manual_seed(0)
    fit(module, noise(), callbacks=[callback], max_steps=steps + 1)
    fork, truth = callback.forks[0], expected(factors, squares[0], stretches)
    assert (fork.step, fork.batch_size) == (steps, BATCH)
    differences = np.array(fork.losses) - fork.losses[0]
    expected_differences = np.array(truth) - truth[0]
    # A margin is 1.9 standard errors. Their estimate scatters too.
    margins = np.maximum(fork.margins, np.median(fork.margins))
    assert (np.abs(differences - expected_differences) <= 3 * margins).all()
    exact = (0.0,) * len(factors)
    true_factor = Fork(steps, BATCH, factors, tuple(truth), exact, fork.tolerance).factor
    assert true_factor / 4 <= fork.factor <= true_factor
    # Noise limits the batch size near the minimum only.
    assert (true_factor < max(factors)) == is_limited


def test_the_margin_is_that_of_the_paired_differences():
    """A shift of all branches of a repetition, such as by its examples, does not count."""
    losses = np.array([[1.0, 1.1, 2.0], [5.0, 5.3, 7.0], [3.0, 3.2, math.inf]])
    first, second, third = margins_of(losses)
    assert first == 0 and math.isnan(third)
    # 95 % of Student's t with 2 degrees of freedom are below 2.920; the deviation is 0.1.
    assert second == pytest.approx(2.920 * 0.1 / math.sqrt(3), rel=1e-3)


@pytest.mark.parametrize("start", [0.02, 10.0])
def test_the_tolerance_is_that_of_the_paper_or_a_share_of_a_small_loss(start):
    callback = BranchCallback([1], (1, 2), 1, 2)
    fit(Quadratic(start), noise(), callbacks=[callback], max_steps=2)
    fork = callback.forks[0]
    expected = TOLERANCE * min(1.0, abs(fork.losses[0]))
    assert fork.tolerance == pytest.approx(expected) and (expected == 0.01) == (start > 1)


@pytest.mark.parametrize(("seconds", "forks"), [(19.0, 1), (21.0, 2)])
def test_a_fork_that_would_end_too_late_does_not_begin(monkeypatch, seconds, forks):
    """Each fork takes 10 s, and the steps between them no time."""
    now = [0.0]
    callback = BranchCallback([1, 2, 3], (1, 2), 1, 2, seconds=seconds)
    monkeypatch.setattr("lit_dps.readings.branching.time.monotonic", lambda: now[0])

    def losses_of_branches(*arguments):
        now[0] += 5.0
        return [1.0, 2.0]

    monkeypatch.setattr(callback, "_losses_of_branches", losses_of_branches)
    fit(Quadratic(), noise(), callbacks=[callback], max_steps=4)
    assert [fork.step for fork in callback.forks] == [1, 2][:forks]


@pytest.mark.parametrize("deviation", [0.001, 0.02, 0.05])
def test_noise_does_not_raise_the_critical_factor(deviation):
    """In truth k = 2 loses nothing, and each doubling beyond it 0.02.

    With two standard errors of three repetitions as the tolerance, 43 and 73 % were too large.
    """
    factors = (1, 2, 4, 8, 16, 32)
    truth = np.array([0.0, 0.0, 0.02, 0.04, 0.06, 0.08])
    rng = np.random.default_rng(0)
    found = []
    for _ in range(2000):
        losses = 3 + truth + deviation * rng.standard_normal((4, len(factors)))
        means = tuple(losses.mean(axis=0))
        found.append(Fork(1, 8, factors, means, margins_of(losses), TOLERANCE).factor)
    assert np.mean(np.array(found) > 2) <= 0.02
    if deviation == 0.001:
        assert np.mean(np.array(found) == 2) > 0.99, "without noise the answer is the truth"


def test_the_critical_batch_size_is_between_what_loses_nothing_and_what_surely_loses():
    def fork(*losses, margin=0.0):
        return Fork(0, 4, (1, 2, 4, 8), losses, (0.0, margin, margin, margin), 0.1)

    assert fork(1.0, 1.05, 0.9, 1.3).critical == (16, 32)
    assert fork(1.0, 1.2, 0.9, 0.9).critical == (4, 8)
    assert fork(1.0, 1.0, math.inf, math.nan).critical == (8, 16)
    assert fork(1.0, 1.0, 1.0, 1.0).critical == (32, math.inf)
    # The excess of the third is 0.2 with limits 0.05 and 0.35, so it does not surely lose.
    assert fork(1.0, 0.9, 1.2, 1.3, margin=0.15).critical == (8, 32)
    assert fork(1.0, 1.0, 1.0, 1.3, margin=0.15).critical == (4, 32)
    diverged = fork(1.0, 1.0, 1.0, math.inf)
    assert Fork.from_dict(diverged.to_dict()).critical == diverged.critical == (16, 32)


def test_nothing_is_known_if_the_branch_of_the_run_diverges():
    """Both larger batch sizes are not worse than a branch that diverged in one repetition."""
    losses = np.array([[math.inf, 0.5, 0.4], [0.6, 0.5, 0.4]])
    means = tuple(map(float, losses.mean(0)))
    fork = Fork(0, 32, (1, 2, 4), means, margins_of(losses), 0.01)
    assert fork.factor == 1 and fork.critical == (32, math.inf)
    assert not fork.has_equal_repetitions
    assert not Fork.from_dict(fork.to_dict()).has_no_rate


class WithUntrained(Plain):
    """Its loss has gradients of a layer that the optimizer does not have."""

    def __init__(self, is_frozen: bool):
        super().__init__()
        self.extra = nn.Linear(4, 1).requires_grad_(not is_frozen)

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) + 3 * self.extra(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.network.parameters(), 0.2)


def losses_of_fork(make_module, **trainer) -> tuple[float, ...]:
    torch.manual_seed(0)
    callback = BranchCallback([1], (1, 2), 2, 2)
    fit(make_module(), loader(), callbacks=[callback], max_steps=2, **trainer)
    return callback.forks[0].losses


def test_a_limit_of_0_clips_no_branch():
    """Lightning does not clip at a limit of 0 either."""
    assert losses_of_fork(Plain, gradient_clip_val=0) == losses_of_fork(Plain)


def test_branches_clip_the_gradients_of_the_optimizers_parameters_alone():
    frozen = losses_of_fork(lambda: WithUntrained(True), gradient_clip_val=0.1)
    unfrozen = losses_of_fork(lambda: WithUntrained(False), gradient_clip_val=0.1)
    assert unfrozen == frozen
    assert frozen != losses_of_fork(lambda: WithUntrained(True))


def test_the_cost_is_the_number_of_passes():
    """A branch trains on the window, and evaluates max(factors) batches after four stretches."""
    with_gradient = []

    class Counted(Plain):
        def training_step(self, batch, batch_idx):
            with_gradient.append(torch.is_grad_enabled())
            return super().training_step(batch, batch_idx)

    callback = BranchCallback([0], (1, 2, 4), 6, 2)
    fit(Counted(), loader(), callbacks=[callback], max_steps=1)
    assert callback.window == 24
    assert sum(with_gradient) == 2 * 3 * 24 + 1
    assert len(with_gradient) - sum(with_gradient) == 2 * 3 * 4 * 4
    assert callback.cost == 2 * 3 * (24 + 6)


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam])
def test_the_run_itself_is_not_touched(make):
    ends = []
    for callbacks in ([], [BranchCallback([1, 3], (1, 2), 2, 2)]):
        torch.manual_seed(5)
        module = Plain(make_optimizer=lambda parameters: make(parameters, lr=0.05))
        fit(module, loader(shuffle=True), callbacks=callbacks, max_steps=6)
        ends.append(weights(module))
        assert module.taken == 6
    assert_equal(*ends)
    assert [fork.step for fork in callbacks[0].forks] == [1, 3]


def test_a_branch_of_factor_1_trains_as_the_run_does():
    """On the same batches, in their order, it is where the run is after as many steps.

    The second repetition begins after half of the batches.
    """
    callback = BranchCallback([0], (1, 2), 1, 2)
    torch.manual_seed(5)
    fit(Plain(), loader(24), callbacks=[callback], max_steps=1)
    means = []
    for first in (0, 3):
        torch.manual_seed(5)
        module = Plain()
        batches = [*loader(24), *loader(24)][first:]
        # The first two batches are for the loss.
        fit(module, DataLoader(batches[2:4], batch_size=None), max_steps=2)
        with torch.no_grad():
            for x, y in batches[:2]:
                means.append(float(nn.functional.cross_entropy(module.network(x), y)))
    assert callback.forks[0].losses[0] == pytest.approx(sum(means) / 4, rel=1e-5)


class Stream(IterableDataset):
    """Examples in a fixed order, without a length."""

    def __iter__(self):
        return iter(points())


class ShortSampler:
    """Yields three shuffled batches, and knows no length."""

    def __iter__(self):
        return iter(torch.randperm(6).reshape(3, 2).tolist())


LOADERS = {
    "in order": loader,
    "own generator": lambda: loader(shuffle=True, generator=torch.Generator().manual_seed(0)),
    "global generator": lambda: loader(shuffle=True),
    "fixed sampler": lambda: DataLoader(points(), batch_sampler=[[0, 1], [2, 3], [4, 5]]),
    "stream": lambda: DataLoader(Stream(), 4),
    "short sampler": lambda: DataLoader(points(), batch_sampler=ShortSampler()),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_each_repetition_has_other_examples(kind):
    """Otherwise the margin is 0: one draw would be certain."""
    module = Plain()
    callback = BranchCallback([1], (1, 2), 2, 3)
    fit(module, LOADERS[kind](), callbacks=[callback], max_steps=2)
    assert callback.forks[0].margins[1] > 0 and module.taken == 2


class Once(IterableDataset):
    """A stream that can be read only once."""

    def __init__(self, count: int):
        self.examples = iter([points()[i] for i in range(count)])

    def __iter__(self):
        return self.examples


class OwnIterator(Once):
    """A stream that is its own iterator."""

    def __iter__(self):
        return self

    def __next__(self):
        return next(self.examples)


@pytest.mark.parametrize(
    "sampled",
    [
        lambda: {"sampler": (i for i in range(20))},
        lambda: {"batch_sampler": ([i] for i in range(20))},
        lambda: {"batch_sampler": BatchSampler((i for i in range(20)), 2, False)},
    ],
)
def test_a_sampler_that_can_be_read_only_once_is_refused(sampled):
    with refuses("data", "generator"):
        train = DataLoader(points(), **sampled())
        fit(Plain(), train, callbacks=[BranchCallback([1], (1, 2), 2, 3)], max_steps=3)


class OnceSampler(Sampler):
    """Knows its length, and is its own iterator."""

    def __init__(self, count: int):
        self.indices = iter(range(count))

    def __len__(self):
        return 20

    def __iter__(self):
        return self

    def __next__(self):
        return next(self.indices)


def test_pruning_takes_no_examples_of_a_run_that_reads_its_data_once():
    train = DataLoader(points(), 4, sampler=OnceSampler(20))
    with refuses("data", "OnceSampler"):
        fit(Plain(), train, callbacks=[PruningCallback(0.5, "snip")], max_steps=3)


def test_several_train_dataloaders_are_refused_before_the_run():
    with refuses("data", "dict"):
        train = {"a": loader(), "b": loader()}
        fit(Plain(), train, callbacks=[BranchCallback([3], (1, 2), 2, 3)], max_steps=4)


class Timed(Callback):
    """Has a stopwatch that runs from the first batch on."""

    def __init__(self):
        self.stopwatch = Stopwatch()

    def on_train_batch_start(self, *_):
        self.stopwatch.switch_to("training")

    def on_train_end(self, *_):
        self.stopwatch.switch_to(None)


def test_the_seconds_of_a_fork_are_no_training(monkeypatch):
    """Each fork takes 100 s and each step 1 s."""
    seconds = [0.0]
    monkeypatch.setattr("lit_dps.training.stopwatch.now", lambda device=None: seconds[0])

    class Slow(BranchCallback):
        def _losses_of_branches(self, trainer, module, repetition):
            seconds[0] += 50
            return [1.0, float(repetition)]

    class Step(Callback):
        def on_train_batch_end(self, *_):
            seconds[0] += 1

    timed = Timed()
    fit(Plain(), callbacks=[timed, Slow([0, 1], (1, 2), 2, 2), Step()], max_steps=3)
    assert seconds == [203.0] and timed.stopwatch.training_seconds == 3.0


@pytest.mark.parametrize(("make", "count"), [(Once, 8), (Once, 20), (OwnIterator, 20)])
def test_a_stream_that_can_be_read_only_once_is_refused(make, count):
    """Each branch would take other examples, which the run would then lack."""
    callback = BranchCallback([1], (1, 2), 2, 3)
    with refuses("data", make.__name__):
        fit(Plain(), DataLoader(make(count), 2), callbacks=[callback], max_steps=3)


class FixedSampler:
    """Yields six batches in a fixed order, and knows no length."""

    def __iter__(self):
        return iter([[2 * i, 2 * i + 1] for i in range(6)])


def test_repetitions_of_a_sampler_without_a_length_begin_at_different_batches():
    """With six batches, those of the repetitions begin at batches 0, 2 and 4."""
    batches = []

    class Listing(BranchCallback):
        def _losses_of_branches(self, trainer, module, repetition):
            skipped = skipped_batches(trainer, repetition, self.repetitions, 6)
            batches.append(next(batches_of_branch(trainer, module, 6, skipped)))
            return [float(repetition), 1.0]

    module = Plain()
    sampled = DataLoader(points(), batch_sampler=FixedSampler())
    fit(module, sampled, callbacks=[Listing([0], (1, 2), 1, 3)], max_steps=1)
    inputs = torch.stack([points()[i][0] for i in range(12)]).reshape(6, 2, -1)
    assert all(torch.equal(x, inputs[i]) for (x, _), i in zip(batches, (0, 2, 4), strict=True))


def test_a_fork_at_a_rate_of_0_shows_nothing():
    """All branches would end with the same loss, as if a larger batch lost nothing."""

    class WarmUp(Plain):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), 0.05)
            warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(step / 4, 1))
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": warm_up, "interval": "step"},
            }

    callback = BranchCallback([0, 1], (1, 2), 1, 2)
    fit(WarmUp(), loader(), callbacks=[callback], max_steps=2)
    at_0, later = callback.forks
    assert at_0.has_no_rate and at_0.critical == (4, math.inf)
    assert "the learning rate is 0" in describe_fork(at_0)
    assert not later.has_no_rate and math.isfinite(later.margins[1])
    assert Fork.from_dict(at_0.to_dict()).has_no_rate


def test_two_repetitions_with_the_same_examples_have_no_margin():
    first, second = [1.0, 1.2], [1.1, 1.4]
    assert margins_of(np.array([first, second]))[1] > 0
    assert math.isnan(margins_of(np.array([first, second, first]))[1])


@pytest.mark.parametrize("order", ["authors", "per_trial"])
def test_repetitions_follow_the_run_in_the_order_of_images(order):
    """The repetitions at step 3 have the run's batches 3 to 10, without a gap."""
    batches = []

    class Listing(BranchCallback):
        def _losses_of_branches(self, trainer, module, repetition):
            skipped = skipped_batches(trainer, repetition, self.repetitions, 4)
            batches.extend(batches_of_branch(trainer, module, 4, skipped))
            return [float(repetition), 1.0]

    module = Plain(nn.Sequential(nn.Flatten(), nn.Linear(64, 3)))
    data = ToyImages(batch_size=2, order=order)
    callbacks = [Listing([3], (1, 2), 1, 2)]
    fit(module, datamodule=data, callbacks=callbacks, max_steps=12, limit_val_batches=0)
    assert [x[:, 0].tolist() for x, _ in batches] == module.batches[3:11]


def test_equal_repetitions_have_no_margin_and_show_nothing():
    """With one batch of all examples, each repetition is the same."""
    callback = BranchCallback([0], (1, 2), 2, 2)
    fit(Plain(), loader(batch_size=20), callbacks=[callback], max_steps=1)
    fork = callback.forks[0]
    assert fork.margins[0] == 0 and math.isnan(fork.margins[1])
    assert fork.critical == (20, math.inf) and fork.has_equal_repetitions
    assert "noise is unknown" in describe_fork(fork) and "+-" not in describe_fork(fork)
    assert Fork.from_dict(fork.to_dict()).has_equal_repetitions


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        ({"factors": (2, 4)}, "factors"),
        ({"factors": (1, 3, 4)}, "factors"),
        ({"repetitions": 1}, "repetitions"),
        ({"stretches": 0}, "stretches"),
        ({"tolerance": -1.0}, "tolerance"),
    ],
)
def test_bad_values_name_their_key(arguments, key):
    with pytest.raises(ConfigError) as caught:
        BranchCallback([1], **arguments)
    assert caught.value.key == f"BranchCallback.{key}"
    value = arguments[key]
    assert caught.value.value == (list(value) if key == "factors" else value)


def test_manual_optimization_is_refused():
    manual = Plain()
    manual.automatic_optimization = False
    with pytest.raises(ConfigError) as caught:
        fit(manual, callbacks=[BranchCallback([1])], max_steps=1)
    assert (caught.value.key, caught.value.value) == ("BranchCallback", "Plain")
