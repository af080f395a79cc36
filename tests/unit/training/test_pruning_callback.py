"""PruningCallback in a real Trainer, on a module and loaders that know nothing of it."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from lit_dps.pruning import Mask
from lit_dps.training import PruningCallback
from tests.support.errors import refuses
from tests.support.tiny import (
    Plain,
    Recorder,
    assert_equal,
    fit,
    loader,
    points,
    two_layers,
    weights,
)

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda p: torch.optim.SGD(
        p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01
    ),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1),
}


def pruned(
    sparsity=0.7,
    method="magnitude",
    optimizer="sgd",
    steps=7,
    module=None,
    train=None,
    callbacks=(),
    more=None,
    **trainer,
):
    """A trained module and its pruning callback, to which `more` arguments go."""
    module = module if module is not None else Plain(make_optimizer=OPTIMIZERS[optimizer])
    callback = PruningCallback(sparsity, method, **(more or {}))
    fit(module, train, callbacks=[callback, *callbacks], max_steps=steps, **trainer)
    return module, callback


def threshold(scores, keep: int) -> float:
    """The lowest of the `keep` highest scores."""
    return torch.cat([score.flatten() for score in scores]).sort(descending=True).values[keep - 1]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("method", ["snip", "magnitude"])
def test_pruned_weights_are_exactly_zero_after_training_and_the_others_move(optimizer, method):
    module, callback = pruned(0.7, method, optimizer)
    moved = 0
    for name, after in weights(module).items():
        keep, before = callback.mask[name], weights(Plain())[name]
        assert not after[~keep].any(), name
        moved += int((after[keep] != before[keep]).sum())
    assert sum(kept for kept, _ in callback.mask.kept().values()) == round(
        43 * 0.3
    )  # 4 x 5 + 5 + 5 x 3 + 3
    assert moved >= 9  # the others hang on paths that are cut: their gradient is zero


class ForwardMasked(Plain):
    """The wrapper that PruningCallback does without: untouched weights below, masked in every
    forward pass."""

    def __init__(self, mask, **arguments):
        super().__init__(**arguments)
        self.mask = mask

    def training_step(self, batch, batch_idx):
        x, y = batch
        masked = {
            name: w * self.mask[f"network.{name}"] for name, w in self.network.named_parameters()
        }
        return F.cross_entropy(torch.func.functional_call(self.network, masked, (x,)), y)


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "nesterov"])
def test_masking_gradients_equals_masking_in_the_forward_pass_bit_for_bit(optimizer):
    module, callback = pruned(0.7, "snip", optimizer, steps=12)
    wrapped = ForwardMasked(callback.mask, make_optimizer=OPTIMIZERS[optimizer])
    fit(wrapped, max_steps=12)
    assert_equal(
        weights(module), {name: w * callback.mask[name] for name, w in weights(wrapped).items()}
    )


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_sparsity_zero_changes_nothing(optimizer):
    module, callback = pruned(0.0, optimizer=optimizer)
    plain = Plain(make_optimizer=OPTIMIZERS[optimizer])
    fit(plain, max_steps=7)
    assert callback.mask is None
    assert_equal(weights(module), weights(plain))


@pytest.mark.parametrize("method", ["snip", "magnitude", "random"])
def test_training_starts_from_the_initial_weights_times_the_mask(method):
    start = Recorder(lambda _, module: weights(module))
    _, callback = pruned(0.6, method, callbacks=[start])
    assert_equal(
        start.values[0], {name: w * callback.mask[name] for name, w in weights(Plain()).items()}
    )


def test_snip_takes_the_gradient_over_one_pass_of_the_train_dataloader():
    _, callback = pruned(0.5, "snip", train=loader(18, 4))  # the last batch has two
    network = two_layers().double()
    x, y = points(18).tensors
    loss = F.cross_entropy(network(x.double()), y, reduction="sum")
    gradients = torch.autograd.grad(loss, list(network.parameters()))
    scores = {
        f"network.{n}": (p * g).abs()
        for (n, p), g in zip(network.named_parameters(), gradients, strict=True)
    }
    flat = torch.cat([score.flatten() for score in scores.values()]).sort(descending=True).values
    keep = round(43 * 0.5)
    assert flat[keep - 1] / flat[keep] > 1.001  # no tie for float32 to break
    for name, score in scores.items():
        assert torch.equal(callback.mask[name], score >= flat[keep - 1]), name


class NamedBatches(Plain):
    """Batches as dicts, as many libraries make them."""

    def training_step(self, batch, batch_idx):
        return super().training_step((batch["x"], batch["y"]), batch_idx)


def test_a_short_last_batch_weighs_by_its_share_also_when_batches_are_dicts():
    def collate(rows):
        return {"x": torch.stack([x for x, _ in rows]), "y": torch.stack([y for _, y in rows])}

    _, tuples = pruned(0.5, "snip", train=loader(17, 8))
    _, dicts = pruned(0.5, "snip", module=NamedBatches(), train=loader(17, 8, collate_fn=collate))
    assert_equal(dict(dicts.mask), dict(tuples.mask))


def test_magnitude_keeps_the_largest_weights_and_keep_leaves_the_biases_out():
    for biases, names in (
        ("paper", list(weights(Plain()))),
        ("keep", ["network.0.weight", "network.2.weight"]),
    ):
        _, callback = pruned(0.6, more={"biases": biases})
        assert sorted(callback.mask) == sorted(names)
        magnitudes = {name: weights(Plain())[name].abs() for name in names}
        lowest = threshold(
            magnitudes.values(), round(sum(map(torch.numel, magnitudes.values())) * 0.4)
        )
        for name in names:
            assert torch.equal(callback.mask[name], magnitudes[name] >= lowest)


def test_random_masks_depend_on_the_seed_alone():
    masks = []
    for seed, global_seed in ((1, 0), (1, 9), (2, 0)):
        torch.manual_seed(global_seed)
        masks.append(dict(pruned(0.5, "random", steps=1, more={"seed": seed})[1].mask))
    assert_equal(masks[0], masks[1])
    assert any(not torch.equal(masks[0][name], masks[2][name]) for name in masks[0])


class Endless(IterableDataset):
    def __iter__(self):
        while True:
            yield from points()


@pytest.mark.parametrize("sparsity", [0.5, 0.0])
def test_an_endless_loader_without_a_pruning_dataloader_is_refused_unless_nothing_is_scored(
    sparsity,
):
    train = DataLoader(Endless(), 4)
    if not sparsity:
        pruned(0.0, "snip", train=train)
        return
    with refuses("data", "DataLoader"):
        pruned(sparsity, "snip", train=train)
    assert pruned(sparsity, "magnitude", train=train)[1].mask is not None  # needs no data


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        ({"sparsity": 1.0}, "pruning.sparsity"),
        ({"sparsity": -0.1}, "pruning.sparsity"),
        ({"batch_size": 0}, "pruning.batch_size"),
        ({"method": "graasp"}, "pruning.method"),
        ({"biases": "none"}, "pruning.biases"),
    ],
)
def test_a_value_that_is_not_allowed_is_refused_by_key(arguments, key):
    with refuses(key):
        PruningCallback(**arguments)


def test_tied_weights_are_pruned_once():
    network = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    network[2].weight = network[0].weight
    module, callback = pruned(0.5, "snip", module=Plain(network))
    assert sum(total for _, total in callback.mask.kept().values()) == 16 + 4 + 4
    assert not network[0].weight[~callback.mask["network.0.weight"]].any()


@pytest.mark.parametrize("method", ["snip", "magnitude"])
def test_pruning_works_in_double_precision_on_an_ordinary_loader(method):
    module, callback = pruned(0.5, method, precision="64-true")
    assert {w.dtype for w in weights(module).values()} == {torch.float64}
    assert callback.mask.sparsity == pytest.approx(1 - round(43 * 0.5) / 43, abs=1e-12)


def test_one_callback_prunes_each_module_it_is_fitted_with_anew():
    callback = PruningCallback(0.5, "magnitude")
    for seed in (1, 2):
        module = Plain(two_layers(seed))
        before = weights(module)
        fit(module, callbacks=[callback], max_steps=1)
        largest = threshold([w.abs() for w in before.values()], round(43 * 0.5))
        for name, keep in callback.mask.items():
            assert torch.equal(keep, before[name].abs() >= largest), (seed, name)


@pytest.mark.parametrize("optimizer", ["nesterov", "adam"])
def test_the_mask_survives_a_checkpoint_and_the_run_goes_on_as_if_unbroken(tmp_path, optimizer):
    train = loader(
        20, 20
    )  # one batch: Lightning does not take up a plain loader where it stood in an epoch
    whole, first = pruned(0.7, "snip", optimizer, steps=10, train=train)
    half = Plain(make_optimizer=OPTIMIZERS[optimizer])
    trainer = fit(half, train, callbacks=[PruningCallback(0.7, "snip")], max_steps=5)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    torch.manual_seed(1)
    resumed, callback = Plain(two_layers(99), OPTIMIZERS[optimizer]), PruningCallback(0.7, "snip")
    fit(resumed, train, callbacks=[callback], max_steps=10, ckpt_path=tmp_path / "half.ckpt")
    assert isinstance(callback.mask, Mask)
    assert_equal(dict(callback.mask), dict(first.mask))
    assert_equal(weights(resumed), weights(whole))
    assert np.count_nonzero(torch.cat([w.flatten() for w in weights(resumed).values()])) == round(
        43 * 0.3
    )
