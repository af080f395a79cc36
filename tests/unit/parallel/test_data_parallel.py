"""Several ranks, each on its part of the batch, train what one process trains on the whole."""

from __future__ import annotations

import dataclasses
import math
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader

from lit_dps.core.errors import ConfigError
from lit_dps.core.trial import Cell, Status, Trial
from lit_dps.data import Digits
from lit_dps.models import MLP, SimpleCNN
from lit_dps.module import ImageClassifier
from lit_dps.parallel import ranks
from lit_dps.parallel.ddp import ShardLoader, trainer_arguments
from lit_dps.training import GoalErrorCallback, PruningCallback
from lit_dps.training.early_validation import EarlyValidation
from lit_dps.training.workload import Workload
from tests.support.errors import refuses
from tests.support.measured import lipschitz, terms_of
from tests.support.pruners import GENERAL
from tests.support.ranks import on_ranks, same_on_ranks
from tests.support.runs import train_one
from tests.support.tiny import QUIET, Plain, fit, loader, weights

MODEL = {
    "class_path": "lit_dps.module.ImageClassifier",
    "init_args": {
        "network": {"class_path": "lit_dps.models.MLP", "init_args": {"hidden": [16]}},
        "optimizer": "momentum",
    },
}
WORKLOAD = Workload(MODEL, {"class_path": "lit_dps.data.Digits"}, {"accelerator": "cpu"})
PARAMS = {"model.learning_rate": 0.05, "model.momentum": 0.9}


def close(ours, theirs, tolerance: float = 1e-6) -> None:
    for name in theirs:
        torch.testing.assert_close(ours[name], theirs[name], rtol=tolerance, atol=tolerance)


def trained(batch_size: int, n: int = 20, steps: int = 7, **options) -> dict[str, torch.Tensor]:
    """Weights after some steps of any module, with Adam, over a plain shuffled loader."""
    torch.manual_seed(5)
    module = Plain(make_optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.05))
    fit(
        module,
        loader(n, batch_size, shuffle=True),
        max_steps=steps,
        **trainer_arguments({**QUIET, **options}),
    )
    return {name: tensor.tolist() for name, tensor in weights(module).items()}


@pytest.mark.parametrize(
    ("world", "batch_size", "n"),
    [
        (2, 4, 20),  # even parts
        (2, 5, 23),  # parts of 2 and 3, and a last batch of 3
        (3, 4, 20),
        (4, 2, 21),  # two ranks without a part, three in the last batch
    ],
)
def test_uneven_and_empty_parts_make_the_update_of_the_whole_batch(world, batch_size, n):
    alone = {name: torch.tensor(w) for name, w in trained(batch_size, n).items()}
    together = same_on_ranks(world, trained, batch_size, n)
    close(
        {name: torch.tensor(w) for name, w in together.items()}, alone, 2e-5
    )  # Adam divides by small numbers


def test_accumulated_batches_of_different_size_too():
    alone = {name: torch.tensor(w) for name, w in trained(4, 22, accumulate_grad_batches=2).items()}
    together = same_on_ranks(2, lambda: trained(4, 22, accumulate_grad_batches=2))
    close({name: torch.tensor(w) for name, w in together.items()}, alone, 2e-5)


def convolutional(batch_size: int) -> dict[str, list]:
    """Weights of the paper's network, whose layout in memory changes as training starts."""
    torch.manual_seed(5)
    module = ImageClassifier(SimpleCNN(), learning_rate=0.1)
    fit(module, datamodule=Digits(batch_size=batch_size), max_steps=2, **trainer_arguments(QUIET))
    return {name: tensor.tolist() for name, tensor in weights(module).items()}


def test_the_first_steps_of_a_convolutional_network_are_those_of_one_process():
    alone = {name: torch.tensor(w) for name, w in convolutional(5).items()}
    close({name: torch.tensor(w) for name, w in same_on_ranks(2, convolutional, 5).items()}, alone)


def pruned(method: str, batch_size: int = 100, dropout: float = 0.0) -> dict[str, str]:
    torch.manual_seed(3)
    callback = PruningCallback(0.7, method, batch_size=batch_size)
    network = MLP(hidden=[16])
    if dropout:
        network = nn.Sequential(nn.Flatten(), nn.Dropout(dropout), network)
    module = ImageClassifier(network)
    fit(
        module,
        datamodule=Digits(batch_size=8),
        callbacks=[callback],
        max_steps=1,
        **trainer_arguments(QUIET),
    )
    masks = {
        name: "".join("01"[int(k)] for k in mask.flatten()) for name, mask in callback.mask.items()
    }
    return masks | {
        f"score {name}": score.tolist() for name, score in (callback.scores or {}).items()
    }


@pytest.mark.parametrize("method", GENERAL)
def test_masks_and_scores_are_those_of_one_process_bit_for_bit(method):
    assert same_on_ranks(2, pruned, method) == pruned(method)


@pytest.mark.parametrize("world", [3, 4])
def test_masks_are_the_same_where_a_rank_has_less_of_the_pass_or_nothing(world):
    assert same_on_ranks(world, pruned, "snip", 900) == pruned("snip", 900)


def test_ranks_of_a_network_with_dropout_have_one_mask():
    # The passes get other random numbers than the pass of one process.
    masks = without_scores(same_on_ranks(2, pruned, "snip", 100, 0.5))
    assert masks and masks != without_scores(pruned("snip", 100, 0.5))


def without_scores(values: dict) -> dict:
    return {name: value for name, value in values.items() if not name.startswith("score ")}


def validated(batch_size: int) -> list[float]:
    torch.manual_seed(3)
    module = ImageClassifier(MLP(hidden=[16]))
    goal = GoalErrorCallback(0.01, check_interval=1, max_steps=3)
    data = Digits(batch_size=16, eval_batch_size=batch_size)
    trainer = fit(module, datamodule=data, callbacks=[goal], **trainer_arguments(QUIET))
    return [*goal.curve["val_error"], float(trainer.callback_metrics["val_loss"])]


@pytest.mark.parametrize(
    ("world", "batch_size"), [(2, 1000), (3, 50), (4, 1)]
)  # 179 validation examples
def test_the_validation_split_is_counted_exactly(world, batch_size):
    assert same_on_ranks(world, validated, batch_size) == pytest.approx(
        validated(batch_size), rel=1e-6, abs=0
    )


class OwnError(LightningModule):
    """Logs a mean over each batch, as a user's module does that knows nothing of ranks."""

    def __init__(self):
        super().__init__()
        self.network = torch.nn.Linear(4, 3)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.network(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_error", (self.network(batch[0]).argmax(1) != batch[1]).float().mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


def own_errors(size: int, batch_size: int) -> list[float]:
    torch.manual_seed(1)
    goal = GoalErrorCallback(0.01, check_interval=1, max_steps=4)
    fit(OwnError(), loader(), loader(size, batch_size), [goal], **trainer_arguments(QUIET))
    return [round(error * size, 4) for error in goal.curve["val_error"]]


@pytest.mark.parametrize(("world", "size", "batch_size"), [(2, 17, 5), (4, 18, 1), (4, 3, 3)])
def test_an_error_that_a_module_logs_for_its_own_part_is_the_mean_over_all(world, size, batch_size):
    together = same_on_ranks(world, own_errors, size, batch_size)
    assert together == own_errors(size, batch_size)
    assert all(mistakes == round(mistakes) for mistakes in together)


def checked() -> list[tuple[int, bool]]:
    torch.manual_seed(3)
    module = ImageClassifier(MLP(hidden=[16]))
    trainer = fit(
        module, datamodule=Digits(), max_steps=2, limit_val_batches=0, **trainer_arguments(QUIET)
    )
    assert EarlyValidation.supports(trainer, module)
    check = EarlyValidation(trainer, module)
    found = []
    for allowed in (179, 3, 100, 0, 178):
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(-0.7)
        found.append(tuple(check(allowed)))
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_a_check_that_stops_early_looks_at_the_same_examples(world):
    assert same_on_ranks(world, checked) == checked()


def trial(batch_size: int, sparsity: float, goal: dict, limit: float = math.inf) -> dict:
    asked = Trial(Cell(batch_size, sparsity), 1, PARAMS)
    own = limit if ranks.rank() == 0 else 0  # the others know nothing of other trials
    result = train_one(asked, WORKLOAD, goal, limit=lambda cell: own, lean=False)
    return dataclasses.asdict(result) | {"seconds": 0, "timed": {}}


@pytest.mark.parametrize(
    ("world", "batch_size", "sparsity", "early", "limit"),
    [(2, 16, 0.0, True, math.inf), (3, 16, 0.9, False, math.inf), (4, 2, 0.5, True, 16)],
)
def test_a_trial_is_the_same_and_ends_on_all_ranks_by_the_first_ones_limit(
    world, batch_size, sparsity, early, limit
):
    goal = {"error": 0.35, "check_interval": 4, "max_steps": 100, "early_reject": early}
    together, alone = (
        same_on_ranks(world, trial, batch_size, sparsity, goal, limit),
        trial(batch_size, sparsity, goal, limit),
    )
    curve, theirs = together.pop("curve"), alone.pop("curve")
    assert (together.pop("flags"), alone.pop("flags")) == ({"ranks": world}, {})
    assert together == alone
    assert curve.pop("train_loss") == pytest.approx(theirs.pop("train_loss"), rel=1e-4)
    assert curve == theirs
    assert together["status"] is (Status.COMPLETE if limit == math.inf else Status.OUTRACED)


def smooth(examples: int | None) -> dict[str, float]:
    torch.manual_seed(3)
    module = ImageClassifier(MLP(hidden=[16]), learning_rate=0.05)
    callback = lipschitz(interval=2, examples=examples, batch_size=300, delta=0.5)
    pruning = PruningCallback(0.5)
    fit(
        module,
        datamodule=Digits(batch_size=16),
        callbacks=[pruning, callback],
        max_steps=2,
        **trainer_arguments(QUIET),
    )
    return {
        **terms_of(callback),
        **{key: values[0] for key, values in callback.columns["lipschitz"].items()},
    }


@pytest.mark.parametrize("examples", [None, 700])
def test_terms_of_the_theory_are_over_all_ranks(examples):
    alone = smooth(examples)
    assert same_on_ranks(2, smooth, examples) == pytest.approx(alone, rel=1e-5)
    assert alone["gradient_variance"] > 0 and alone["lipschitz"] > 0


def read_trial() -> dict:
    goal = {"error": 0.01, "check_interval": 4, "max_steps": 8}
    smoothness = {"interval": 4, "examples": 64, "delta": 0.5, "noise": True}
    asked = Trial(Cell(16, 0.5), 1, PARAMS)
    result = train_one(asked, WORKLOAD, goal, lean=False, smoothness=smoothness)
    terms = {name: value for name, value in result.flags.items() if name != "ranks"}
    return {**result.readings["lipschitz"], **terms}


def test_the_readings_of_a_trial_are_over_all_ranks():
    alone = read_trial()
    together = same_on_ranks(2, read_trial)
    assert together.keys() == alone.keys()
    assert together["step"] == alone["step"] == [4, 8]
    for name, value in alone.items():
        assert together[name] == pytest.approx(value, rel=1e-3), name


def other_orders() -> None:
    generator = torch.Generator().manual_seed(ranks.rank())
    fit(Plain(), loader(shuffle=True, generator=generator), max_steps=2, **trainer_arguments(QUIET))


def other_validation_orders() -> None:
    generator = torch.Generator().manual_seed(ranks.rank())
    list(ShardLoader(loader(shuffle=True, generator=generator)))


@pytest.mark.parametrize("iterate", [other_orders, other_validation_orders])
def test_loaders_that_differ_between_ranks_are_refused(iterate):
    for error in on_ranks(2, iterate):
        assert isinstance(error, ConfigError)
        assert error.key is not None and "ranks" in error.allowed


def validated_after_dropout() -> list[float]:
    torch.rand(ranks.rank())  # dropout draws a number for each example of a rank
    parts = [batch[1] for batch in ShardLoader(loader(shuffle=True))]
    every_rank = ranks.all_gather(torch.cat(parts).flatten().tolist())
    return sorted(value for of_rank in every_rank for value in of_rank)


def test_a_shuffled_validation_split_is_counted_once_on_ranks():
    whole = torch.cat([batch[1] for batch in loader()]).flatten()
    assert same_on_ranks(2, validated_after_dropout) == sorted(whole.tolist())


class Draws(Plain):
    """Keeps what it draws in each training step, and what it draws after each step."""

    def __init__(self):
        super().__init__()
        self.drawn, self.drawn_in_hooks = [], []

    def training_step(self, batch, batch_idx):
        self.drawn += [float(torch.rand(1)), float(np.random.rand()), random.random()]
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.drawn_in_hooks += [float(torch.rand(1)), float(np.random.rand()), random.random()]


class ManualDraws(Draws):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        self.manual_backward(super().training_step(batch, batch_idx))
        self.optimizers().step()


def drawn_by(make_module, seed: int = 5) -> tuple[list, list, list]:
    """What a rank draws in two epochs: in its steps, in other hooks, and for the order."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    module = make_module()
    fit(module, loader(8, shuffle=True), max_steps=4, **trainer_arguments(QUIET))
    return module.drawn, module.drawn_in_hooks, ranks.all_gather(module.batches)


def test_each_rank_draws_its_own_numbers_in_a_step_and_the_same_numbers_elsewhere():
    (first, first_hooks, order), (second, second_hooks, same_order) = on_ranks(2, drawn_by, Draws)
    assert len(first) == len(second) == 12
    assert len({*first, *second}) == 24
    assert first_hooks == second_hooks and len(set(first_hooks)) == 12
    assert order == same_order
    assert on_ranks(2, drawn_by, Draws)[1] == (second, second_hooks, order)
    assert not {*first, *second} & set(on_ranks(2, drawn_by, Draws, 6)[0][0])


def test_with_manual_optimization_all_ranks_draw_the_same_numbers():
    drawn, _, _ = same_on_ranks(2, drawn_by, ManualDraws)
    assert len(set(drawn)) == 12


def test_a_part_is_cut_out_of_every_tensor_of_a_batch(monkeypatch):
    monkeypatch.setattr(ranks, "world", lambda: 2)
    monkeypatch.setattr(ranks, "rank", lambda: 1)
    monkeypatch.setattr(ranks, "all_gather", lambda value: [value])
    monkeypatch.setattr(ranks, "broadcast", lambda value: value)
    batch = {"x": torch.arange(5), "pair": (torch.arange(5) + 10, "text"), "one": torch.tensor(7.0)}
    shares = {}
    (part,) = ShardLoader([batch], shares)
    assert part["x"].tolist() == [2, 3, 4] and part["pair"][0].tolist() == [12, 13, 14]
    assert (part["pair"][1], float(part["one"]), shares) == ("text", 7.0, {0: 0.6})
    with refuses("trainer.strategy", "ddp"):
        list(ShardLoader([{"x": 3}], shares))


@dataclasses.dataclass
class Labels:
    y: torch.Tensor


def test_arrays_and_texts_belong_to_their_examples(monkeypatch):
    monkeypatch.setattr(ranks, "world", lambda: 2)
    monkeypatch.setattr(ranks, "rank", lambda: 1)
    monkeypatch.setattr(ranks, "all_gather", lambda value: [value])
    monkeypatch.setattr(ranks, "broadcast", lambda value: value)
    examples = [(torch.tensor([float(i)]), f"text {i}", {"ref": str(i)}) for i in range(4)]
    (part,) = ShardLoader(DataLoader(examples, 4), {})
    assert part[0].flatten().tolist() == [2, 3]
    assert list(part[1]) == ["text 2", "text 3"] and list(part[2]["ref"]) == ["2", "3"]
    of_all = ("mean", 3, None)
    (pair,) = ShardLoader([(torch.arange(2), np.array([5, 6]), of_all, ["a"] * 7)], {})
    assert [pair[0].tolist(), pair[1].tolist(), *pair[2:]] == [[1], [6], of_all, ["a"] * 7]
    with refuses("trainer.strategy", "ddp"):
        list(ShardLoader([(torch.arange(2), ("mean", 3))], {}))
    with refuses("trainer.strategy", "ddp"):
        list(ShardLoader([(torch.arange(4), Labels(torch.arange(4)))], {}))
    with refuses("trainer.strategy", "ddp"):
        list(ShardLoader([(torch.arange(4), np.arange(3))], {}))


class OwnMetrics(OwnError):
    """Logs other metrics than means over examples."""

    def __init__(self, way: str):
        super().__init__()
        self.way = way
        self.totals = torch.zeros(2)

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        x, y = batch
        right = self.network(x).argmax(1) == y
        tokens = int((1 + 4 * y).sum())
        self.totals += torch.tensor([float(right.sum()), len(y)])
        if self.way == "tokens":
            mean = ((1 + 4 * y) * right).sum() / tokens
            self.log("metric", mean, batch_size=tokens, on_step=True, on_epoch=True)
        elif self.way == "loaders":
            self.log("metric", right.float().mean())
        elif self.way == "sums":
            self.log("metric", right.float().mean(), reduce_fx="sum", on_step=True, on_epoch=True)

    def on_validation_epoch_end(self):
        totals = self.totals
        self.totals = torch.zeros(2)
        if self.way == "summed":
            totals = ranks.all_reduce_sum(totals)
        if self.way in ("summed", "own"):
            self.log("metric", (totals[0] / totals[1]).exp())

    def on_validation_batch_end(self, outputs, batch, batch_idx, dataloader_idx=0):
        x, y = batch
        if self.way == "largest":
            self.log("metric", self.network(x).max(), reduce_fx="max", on_epoch=True)
        elif self.way == "mean of a hook":
            right = self.network(x).argmax(1) == y
            self.log("metric", right.float().mean(), on_epoch=True, batch_size=len(y))


def own_metrics(way: str, name: str = "metric") -> list[float]:
    torch.manual_seed(1)
    goal = GoalErrorCallback(metric=name, at_least=9.0, check_interval=1, max_steps=3)
    validation = loader(17, 5)
    if way in ("loaders", "sums"):
        validation = [loader(17, 5), loader(7, 1)]  # a rank has 3 of the last 7
    fit(OwnMetrics(way), loader(), validation, [goal], **trainer_arguments(QUIET))
    return goal.curve[name]


@pytest.mark.parametrize(
    ("way", "name"),
    [
        ("tokens", "metric"),
        ("tokens", "metric_epoch"),
        ("loaders", "metric/dataloader_idx_0"),
        ("loaders", "metric/dataloader_idx_1"),
        ("summed", "metric"),
        ("mean of a hook", "metric"),
    ],
)
def test_metrics_of_ranks_have_the_weights_of_their_batches(way, name):
    alone = own_metrics(way, name)
    assert len(set(alone)) > 1
    assert same_on_ranks(2, own_metrics, way, name) == pytest.approx(alone, rel=1e-6)


@pytest.mark.parametrize("name", ["metric/dataloader_idx_1", "metric_epoch/dataloader_idx_1"])
def test_a_sum_over_the_batches_of_a_later_loader_is_refused(name):
    with refuses("goal.metric", name):
        own_metrics("sums", name)


@pytest.mark.parametrize("way", ["own", "largest"])
def test_a_metric_of_a_whole_split_that_differs_between_ranks_is_refused(way):
    for error in on_ranks(2, own_metrics, way):
        assert isinstance(error, ConfigError)
        assert (error.key, error.value) == ("goal.metric", "metric")
