"""The transformer over characters and its text."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F

from lit_dps.core.config import StorageConfig, StudyConfig
from lit_dps.core.errors import DataError
from lit_dps.core.search_space import Range
from lit_dps.core.trial import Cell, Status, Trial
from lit_dps.data import Text
from lit_dps.models import Transformer
from lit_dps.models.transformer import Attention
from lit_dps.module import LanguageModel
from lit_dps.pruning import Network, prunable, pruner_of
from lit_dps.training.workload import Workload
from tests.support.errors import refuses
from tests.support.ranks import same_on_ranks
from tests.support.runs import train, train_one
from tests.support.saved_study import Study
from tests.support.setups import check, setup_of
from tests.support.texts import numbers_in
from tests.support.tiny import QUIET, fit
from tests.unit.engines.test_engine import quiet  # noqa: F401
from tests.unit.training.test_checkpoint_callback import assert_goes_on

SMALL = {"width": 8, "depth": 1, "heads": 2}
MODEL = {
    "class_path": "lit_dps.module.LanguageModel",
    "init_args": {
        "network": {"class_path": "lit_dps.models.Transformer", "init_args": SMALL},
        "optimizer": "adam",
    },
}
DATA = {"class_path": "lit_dps.data.Text"}
GOAL = {"metric": "val_loss", "at_most": 3.5, "check_interval": 4, "max_steps": 40}
PARAMS = {"model.learning_rate": 0.02}
WORKLOAD = Workload(MODEL, DATA, {"accelerator": "cpu"})


def made(**arguments) -> Transformer:
    torch.manual_seed(0)
    network = Transformer(**{**SMALL, **arguments})
    for p in network.parameters():  # what is zero or one hides mistakes
        torch.nn.init.normal_(p, std=0.3)
    return network


def test_no_position_sees_what_comes_later():
    network, x = made(depth=2), torch.randint(92, (3, 32))
    before = network(x)
    assert before.shape == (3, 92, 32)
    for at in (0, 10, 31):
        other = x.clone()
        other[:, at] = (other[:, at] + 1) % 92
        after = network(other)
        assert torch.equal(after[:, :, :at], before[:, :, :at])
        assert not torch.allclose(after[:, :, at:], before[:, :, at:])


def test_attention_is_torchs_own():
    attention, x = made().layers[0].attention, torch.randn(2, 7, 8)
    query, key, value = (
        part.view(2, 7, 2, 4).transpose(1, 2) for part in attention.inputs(x).chunk(3, -1)
    )
    mixed = (
        F.scaled_dot_product_attention(query, key, value, is_causal=True)
        .transpose(1, 2)
        .reshape(2, 7, 8)
    )
    torch.testing.assert_close(attention(x), attention.output(mixed))


def test_the_untrained_network_knows_no_character():
    torch.manual_seed(0)
    network, x = Transformer(), torch.randint(92, (64, 32))
    loss = F.cross_entropy(network(x), torch.randint(92, (64, 32)))
    assert loss.item() == pytest.approx(math.log(92), rel=0.01)
    out = network.layers[0].output.weight
    assert out.std().item() == pytest.approx(0.02 / 2, rel=0.1)
    assert network.head.weight.std().item() == pytest.approx(0.02, rel=0.1)


@pytest.mark.parametrize(
    ("arguments", "key", "value"),
    [
        ({"width": 9}, "model.network.width", 9),
        ({"depth": 0}, "model.network.depth", 0),
    ],
)
def test_shapes_that_cannot_be_are_refused(arguments, key, value):
    with refuses(key, value):
        Transformer(**{**SMALL, **arguments})


def text(**arguments) -> Text:
    data = Text(**arguments)
    data.setup("fit")
    return data


def test_windows_and_their_next_characters(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("".join(chr(97 + i % 23) for i in range(1000)))
    data = text(path=str(file), context=10, batch_size=4)
    assert (data.training_size, data.validation_size, len(data.images.y["test"])) == (81, 8, 9)
    assert data.vocabulary == 23
    for split in ("train", "val", "test"):
        x, y = data.images.x[split], data.images.y[split]
        assert x.shape == y.shape and torch.equal((x + 1) % 23, y)
    starts = torch.cat([data.images.x["train"][:, 0], data.images.x["val"][:, 0]])
    assert sorted(starts.tolist()) == sorted(10 * i % 23 for i in range(89)), "each window once"
    other = text(path=str(file), context=10, batch_size=4, train_examples=5)
    assert other.training_size == 5 and other.digest == data.digest


def test_the_text_that_is_there_without_a_file():
    data = text()
    assert data.training_size > 900 and data.validation_size > 100 and 80 < data.vocabulary < 128


def test_texts_that_do_not_serve_are_refused(tmp_path):
    file = str(tmp_path / "none.txt")
    with refuses("data.path", file, error=DataError):
        text(path=file)
    (tmp_path / "short.txt").write_text("ab" * 50)
    with refuses("data.context", 32) as refused:
        text(path=str(tmp_path / "short.txt"))
    assert numbers_in(refused.value.allowed)[0] == 100
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe\x00")
    file = str(tmp_path / "bytes.txt")
    with refuses("data.path", file, error=DataError):
        text(path=file)


def test_the_loss_is_in_nats_a_character():
    module, data = LanguageModel(made()), text(batch_size=16)
    fit(module, datamodule=data, max_steps=1, val_check_interval=1, **QUIET)
    x, y = data.images.x["val"], data.images.y["val"]
    with torch.no_grad():
        logp = F.log_softmax(module(x), 1).gather(1, y[:, None])[:, 0]
        errors = (module(x).argmax(1) != y).double().mean()
    assert module.trainer.callback_metrics["val_loss"].item() == pytest.approx(
        -logp.mean().item(), rel=1e-5
    )
    assert module.trainer.callback_metrics["val_error"].item() == pytest.approx(
        errors.item(), rel=1e-6
    )


@pytest.mark.parametrize(
    ("network", "key", "value"),
    [
        ({"vocabulary": 60}, "model.network.vocabulary", 60),
        ({"context": 8}, "data.context", 32),
    ],
)
def test_a_network_for_another_text_is_refused(network, key, value):
    with refuses(key, value):
        fit(
            LanguageModel(Transformer(**{**SMALL, **network})),
            datamodule=text(batch_size=16),
            max_steps=1,
            **QUIET,
        )


@pytest.mark.parametrize("method", ["snip", "magnitude", "force"])
def test_it_is_pruned_and_trained_to_its_goal(method):
    found = train_one(Trial(Cell(32, 0.5), 0, PARAMS), WORKLOAD, GOAL, pruning={"method": method})
    kept, total = map(sum, zip(*found.kept.values(), strict=True))
    assert kept == pytest.approx(total / 2, abs=1)
    assert any("characters" in name for name in found.kept) and not any(
        "norm" in name for name in found.kept
    )
    assert found.status is Status.COMPLETE and found.curve["val_loss"][-1] <= 3.5


class Fused(Attention):
    """The same by torch's fused kernel, which has no second derivative."""

    def forward(self, x):
        shape = (*x.shape[:2], self.heads, -1)
        query, key, value = (
            part.view(shape).transpose(1, 2) for part in self.inputs(x).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.output(mixed.transpose(1, 2).flatten(2))


def grasp(network: Transformer, **options) -> dict[str, torch.Tensor]:
    data = text(batch_size=8)
    batches = [
        ((data.images.x["train"][i : i + 8], data.images.y["train"][i : i + 8]), 8) for i in (0, 8)
    ]
    found = Network(
        network, prunable(network), 8, lambda: 2, lambda: iter(batches), lambda batch, i: None
    )
    return pruner_of("grasp", options).scores(found, torch.Generator())


def test_grasp_is_half_of_the_change_of_the_squared_gradient_through_attention():
    """w_i d/dw_i (|g|^2 / 2) by central differences, of the mean over all positions of the logits
    over 200."""
    network, data = made().double(), text(batch_size=8)
    found = grasp(network)

    def half_square() -> float:
        total = 0.0
        x, y = data.images.x["train"][:16], data.images.y["train"][:16]
        loss = sum(F.cross_entropy(network(x[i : i + 8]) / 200, y[i : i + 8]) for i in (0, 8))
        for g in torch.autograd.grad(loss, [network.get_parameter(name) for name in found]):
            total += float(g.square().sum()) / 2
        return total

    for name, i in (
        ("characters.weight", 500),
        ("layers.0.attention.inputs.weight", 70),
        ("head.weight", 9),
    ):
        weight, h = network.get_parameter(name).data.view(-1), 1e-4
        start = float(weight[i])
        weight[i] = start + h
        above = half_square()
        weight[i] = start - h
        below = half_square()
        weight[i] = start
        assert float(found[name].view(-1)[i]) == pytest.approx(
            start * (above - below) / (2 * h), rel=1e-4
        )


def test_grasp_takes_a_fused_attention_apart():
    plain, fused = made().double(), made().double()
    fused.layers[0].attention.__class__ = Fused
    ours = grasp(fused)
    for name, score in grasp(plain).items():
        torch.testing.assert_close(ours[name], score)
    with refuses("pruning.options.per_class", 10):
        grasp(plain, per_class=10)


def test_grasp_prunes_it_to_the_exact_share():
    found = train_one(
        Trial(Cell(32, 0.5), 0, PARAMS),
        WORKLOAD,
        {**GOAL, "max_steps": 4},
        pruning={"method": "grasp"},
    )
    kept, total = map(sum, zip(*found.kept.values(), strict=True))
    assert kept == round(total / 2) and any("attention" in name for name in found.kept)


def test_synflow_is_refused_before_anything_is_created(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    space = {"model.learning_rate": Range(1e-3, 0.1, "log")}
    study = StudyConfig(space=space, trials=1, batch_sizes=[16], sparsities=[0.5])
    pruning = {"method": "synflow", "biases": "paper", "batch_size": 100}
    setup = setup_of(study, StorageConfig(), WORKLOAD, GOAL, pruning, {"interval": None})
    with refuses("pruning.method", "synflow"):
        check(setup)
    assert list(tmp_path.iterdir()) == []


def test_it_goes_on_from_a_checkpoint(tmp_path):
    goal = {**GOAL, "at_most": 1.0, "max_steps": 24}
    assert_goes_on(
        Study(tmp_path, model=MODEL, data=DATA, goal=goal), Trial(Cell(16, 0.5), 1, PARAMS), (2, 3)
    )


def together() -> dict:
    found = train_one(
        Trial(Cell(15, 0.5), 0, PARAMS),
        WORKLOAD,
        {**GOAL, "at_most": 1.0, "max_steps": 8},
        lean=False,
    )
    return {"status": found.status, "loss": [round(loss, 4) for loss in found.curve["val_loss"]]}


def test_several_ranks_train_it_together():
    assert same_on_ranks(2, together) == together()


def test_smaller_texts_and_other_widths_are_axes():
    axes = [(("data.train_examples", 64), ("model.network.width", w)) for w in (4, 8)]
    found = train(
        [Trial(Cell(64, 0.5, others), 0, PARAMS) for others in axes],
        WORKLOAD,
        {**GOAL, "max_steps": 4},
    )
    assert len({str(r.kept) for r in found}) == 2 and {r.status for r in found} == {
        Status.INCOMPLETE
    }
    again = train([Trial(Cell(64, 0.5, axes[0]), 0, PARAMS)], WORKLOAD, {**GOAL, "max_steps": 4})
    assert dataclasses.replace(again[0], seconds=0) == dataclasses.replace(found[0], seconds=0)
