"""Masks and weights from a file: every kind of file, and what is refused."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.nn.utils import prune

from lit_dps.core.config import StorageConfig, StudyConfig
from lit_dps.core.search_space import Range
from lit_dps.core.trial import Cell, Trial
from lit_dps.data import Digits
from lit_dps.models import MLP
from lit_dps.module import ImageClassifier
from lit_dps.pruning import pruner_of
from lit_dps.pruning.from_file import PATH_KEY, WEIGHTS_KEY, FromFile, read_masks
from lit_dps.study.preflight.dry_run import dry_run
from lit_dps.training import PruningCallback
from lit_dps.training.workload import Workload
from tests.support import tiny
from tests.support.errors import refuses
from tests.support.pruners import mask, network, small
from tests.support.runs import train, train_one
from tests.support.setups import check, setup_of
from tests.unit.pruning.test_pruners_engines import GOAL

NETWORK = {"class_path": "lit_dps.models.MLP", "init_args": {"hidden": [8]}}
MODEL = {
    "class_path": "lit_dps.module.ImageClassifier",
    "init_args": {"network": NETWORK, "optimizer": "momentum"},
}
DATA = {"class_path": "lit_dps.data.Digits", "init_args": {}}
WORKLOAD = Workload(MODEL, DATA, {"accelerator": "cpu"})
PARAMS = {"model.learning_rate": 0.1}


@pytest.fixture
def checkpoint(tmp_path):
    """A checkpoint of Lightning, trained for 3 steps at S = 0.8, and its callback."""
    torch.manual_seed(0)
    module = ImageClassifier(MLP(hidden=[8]), optimizer="momentum", learning_rate=0.1)
    pruning = PruningCallback(0.8, "snip")
    trainer = tiny.fit(module, datamodule=Digits(batch_size=16), callbacks=[pruning], max_steps=3)
    path = tmp_path / "pruned.ckpt"
    trainer.save_checkpoint(path)
    return path, pruning.mask, module


def options(path, **others):
    return {"method": "from_file", "options": {"path": str(path), **others}}


def test_a_study_trains_under_the_mask_of_a_checkpoint(checkpoint):
    path, expected, _ = checkpoint
    assert all(torch.equal(read_masks(str(path)).masks[name], expected[name]) for name in expected)
    trial = Trial(Cell(16, 0.8), 0, PARAMS)
    results = []
    for lean in (True, False):
        result = train_one(trial, WORKLOAD, GOAL, lean=lean, pruning=options(path))
        results.append(dataclasses.replace(result, seconds=0.0))
    assert not results[0].failure and results[0] == results[1]
    assert results[0].kept == expected.kept()


def test_training_begins_with_the_weights_of_the_checkpoint(checkpoint):
    path, _, module = checkpoint
    data = Digits(batch_size=16)
    data.prepare_data()
    data.setup("fit")
    x, y = data.on_device("val", module.device)
    with torch.no_grad():
        loss = float(module.summed_loss((x, y))) / len(y)
    trials = [Trial(Cell(16, 0.8), point, {"model.learning_rate": 1e-9}) for point in (0, 1)]
    pruning = options(path, weights=True)
    arguments = {"pruning": pruning, "metrics": ["val_loss"]}
    for result in (
        train_one(trials[0], WORKLOAD, GOAL, **arguments),
        train_one(trials[0], WORKLOAD, GOAL, lean=False, **arguments),
        *train(trials, WORKLOAD, GOAL, size=2, **arguments),
    ):
        assert result.curve["val_loss"] == pytest.approx([loss, loss], rel=1e-5)
    arguments = {"pruning": options(path), "metrics": ["val_loss"]}
    other = train_one(trials[0], WORKLOAD, GOAL, **arguments)
    assert abs(other.curve["val_loss"][0] - loss) > 0.1 * loss


def test_masks_of_a_dict_of_torch_and_of_a_trial_are_read(tmp_path):
    masks = {"0.weight": torch.tensor([[1, 0], [0, 1]]), "0.bias": torch.tensor([0.0, 1.0])}
    torch.save(masks, tmp_path / "dict.pt")
    torch.save({"mask": masks, "module": {}, "run": {}}, tmp_path / "trial.ckpt")
    module = torch.nn.Sequential(torch.nn.Linear(2, 2))
    prune.custom_from_mask(module[0], "weight", masks["0.weight"])
    prune.custom_from_mask(module[0], "bias", masks["0.bias"])
    torch.save(module.state_dict(), tmp_path / "torch.pt")
    torch.save({"state_dict": module.state_dict()}, tmp_path / "lightning.ckpt")
    for path in tmp_path.iterdir():
        found = read_masks(str(path)).masks
        assert {name: keep.tolist() for name, keep in found.items()} == {
            "0.weight": [[True, False], [False, True]],
            "0.bias": [False, True],
        }


def saved(path, change) -> str:
    """Save a mask of `small` at S = 0.5 after a change, and return the path."""
    masks = dict(mask("random", network(small()), 0.5))
    change(masks)
    torch.save(masks, path)
    return str(path)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda masks: masks.pop("0.bias"), "without a mask of 0.bias"),
        (lambda masks: masks.update({"9.weight": masks["0.weight"]}), "with a mask of 9.weight"),
        (lambda masks: masks.update({"0.bias": torch.ones(5).bool()}), "of shape 5, not 4"),
    ],
)
def test_a_mask_that_does_not_fit_is_refused_in_one_line(tmp_path, change, text):
    path = saved(tmp_path / "mask.pt", change)
    with refuses(PATH_KEY, path) as refused:
        mask("from_file", network(small()), 0.5, path=path)
    assert text in str(refused.value) and "\n" not in str(refused.value)


def test_another_sparsity_and_files_without_masks_are_refused(tmp_path):
    path = saved(tmp_path / "mask.pt", lambda masks: None)
    with refuses("study.sparsities", 0.6) as refused:
        mask("from_file", network(small()), 0.6, path=path)
    assert "keeps 422 of 843 weights" in str(refused.value)
    # The advice is accepted, also for a network of many weights.
    large = tmp_path / "large.pt"
    keep = torch.zeros(25_557_032, dtype=torch.bool)
    keep[:2_556_789] = True
    torch.save({"weight": keep}, large)
    with refuses("study.sparsities", 0.9) as refused:
        pruner_of("from_file", {"path": str(large)}).check_sparsity(0.9)
    advised = float(str(refused.value).partition("must be ")[2].partition(",")[0])
    pruner_of("from_file", {"path": str(large)}).check_sparsity(advised)
    with refuses("pruning.options.weights", True):
        mask("from_file", network(small()), 0.5, path=path, weights=True)
    with refuses(PATH_KEY):
        pruner_of("from_file", {"path": str(tmp_path / "none.pt")})
    (tmp_path / "text.pt").write_text("no tensors")
    torch.save({"epoch": 1}, tmp_path / "empty.pt")
    torch.save({"0.weight": torch.rand(2, 2)}, tmp_path / "weights.pt")
    for name in ("text.pt", "empty.pt", "weights.pt"):
        with refuses(PATH_KEY):
            mask("from_file", network(small()), 0.5, path=str(tmp_path / name))


def study(path, sparsities, method="from_file", weights=False, **grid):
    space = {"model.learning_rate": Range(1e-3, 1.0, "log")}
    config = StudyConfig(batch_sizes=[16], sparsities=sparsities, grid=grid, space=space, trials=1)
    pruning = {**options(path, weights=weights), "method": method}
    return setup_of(config, StorageConfig(), WORKLOAD, GOAL, pruning, {"interval": None})


def test_a_study_refuses_before_it_creates_anything(checkpoint):
    path, _, _ = checkpoint
    check(study(path, [0.0, 0.8]))
    with refuses("study.sparsities", 0.5):
        check(study(path, [0.5, 0.8]))
    with refuses("study.grid", PATH_KEY):
        check(study(path, [0.8], **{PATH_KEY: [str(path), "other"]}))


def test_a_dry_run_notes_weights_of_the_file(checkpoint):
    path, _, _ = checkpoint
    notes = []
    for weights, sparsities in ((False, [0.8]), (True, [0.8]), (True, [0.0])):
        notes.append(dry_run(study(path, sparsities, weights=weights))[1])
    assert [sum(WEIGHTS_KEY in note for note in each) for each in notes] == [0, 1, 0]


class Flipped(FromFile):
    """A subclass, which another package may have."""


@pytest.mark.parametrize("method", ["from_file", "lit_dps.pruning.FromFile", f"{__name__}.Flipped"])
def test_the_content_of_the_file_is_the_identity_and_not_its_path(method, checkpoint, tmp_path):
    path, expected, _ = checkpoint
    data = Digits(batch_size=16)
    data.prepare_data()
    data.setup("fit")
    copied = tmp_path / "copy.ckpt"
    copied.write_bytes(path.read_bytes())
    identity = study(path, [0.8], method).identity(data)
    assert study(copied, [0.8], method).identity(data) == identity
    torch.save({name: keep.flip(0) for name, keep in expected.items()}, copied)
    assert study(copied, [0.8], method).identity(data) != identity


def test_a_shuffled_mask_of_a_file_has_its_weights_and_its_content_is_the_identity(
    checkpoint, tmp_path
):
    path, expected, module = checkpoint
    copied = tmp_path / "copy.ckpt"
    copied.write_bytes(path.read_bytes())

    def shuffled(file):
        return {"of": "from_file", "options": {"path": str(file), "weights": True}}

    torch.manual_seed(1)
    other = ImageClassifier(MLP(hidden=[8]), optimizer="momentum", learning_rate=1e-12)
    pruning = PruningCallback(0.8, "shuffle", options=shuffled(path))
    tiny.fit(other, datamodule=Digits(batch_size=16), callbacks=[pruning], max_steps=1)
    assert pruning.mask.kept() == expected.kept()
    state = module.state_dict()
    for name, keep in pruning.mask.items():
        torch.testing.assert_close(other.get_parameter(name), state[name] * keep)

    data = Digits(batch_size=16)
    data.prepare_data()
    data.setup("fit")
    identities = []
    for file in (path, copied):
        setup = study(file, [0.8])
        pruning_config = dataclasses.replace(
            setup.pruning, method="shuffle", options=shuffled(file)
        )
        identities.append(dataclasses.replace(setup, pruning=pruning_config).identity(data))
    assert identities[0] == identities[1]
    torch.save({name: keep.flip(0) for name, keep in expected.items()}, copied)
    setup = dataclasses.replace(
        setup, pruning=dataclasses.replace(pruning_config, options=shuffled(copied))
    )
    assert setup.identity(data) != identities[0]
