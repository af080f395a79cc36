"""A study whose code or data are edited between two runs: refused, or noted where that is
accepted."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.support.errors import error_line
from tests.support.texts import in_one_line

CODE = """
import lightning.pytorch as pl
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from scales_of_mine import SCALE


class Points(pl.LightningDataModule):
    def __init__(self, batch_size: int = 8):
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage=None):
        arrays = np.load("points.npz")
        x, y = torch.tensor(arrays["x"]), torch.tensor(arrays["y"])
        self.train, self.val = TensorDataset(x[:200], y[:200]), TensorDataset(x[200:], y[200:])

    def train_dataloader(self):
        return DataLoader(self.train, self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, 50)


class Net(pl.LightningModule):
    def __init__(self, lr: float = 0.1):
        super().__init__()
        self.lr, self.net = lr, nn.Linear(5, 2)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return SCALE * nn.functional.cross_entropy(self.net(x), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_error", (self.net(x).argmax(1) != y).float().mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)
"""

NO_GOAL = 3  # exit code of a study whose trials ran: ten steps are too few for the goal


def write_points(folder: Path, flipped: int | None = None) -> None:
    random = np.random.default_rng(0)
    x = random.normal(size=(300, 5)).astype("float32")
    y = (x.sum(1) > 0).astype("int64")
    if flipped is not None:
        y[flipped] ^= 1
    np.savez(folder / "points.npz", x=x, y=y)


@pytest.fixture
def study(tmp_path, monkeypatch, zoo):
    """Runs the study in its folder with the files as they are, as often as it is called."""
    (tmp_path / "code_of_mine.py").write_text(CODE)
    (tmp_path / "scales_of_mine.py").write_text("SCALE = 1.0\n")
    write_points(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def forget() -> None:
        for name in ("code_of_mine", "scales_of_mine"):
            sys.modules.pop(name, None)
        importlib.invalidate_caches()

    def run(trials: int, *options: str):
        forget()
        goal, space = (
            {"error": 0.02, "max_steps": 10},
            {"model.lr": {"low": 0.05, "high": 0.5, "scale": "log"}},
        )
        asked = {"batch_sizes": [8], "sparsities": [0.0], "noise_scale": False, "trials": trials}
        model, data = (
            {"class_path": f"code_of_mine.{name}", "init_args": {}} for name in ("Net", "Points")
        )
        return zoo(model=model, data=data, goal=goal, space=space, options=options, **asked)

    yield tmp_path, run
    forget()


def test_edited_code_and_data_are_refused_or_noted(study):
    folder, run = study
    assert run(1).code == NO_GOAL
    (folder / "scales_of_mine.py").write_text("SCALE = 1.0  # of the loss\n")
    done = run(2)
    assert done.code == NO_GOAL and len(done.results) == 2, "a comment changes no result"
    (folder / "scales_of_mine.py").write_text("SCALE = 1.5\n")
    refused = run(3)
    assert refused.code == 2 and "scales_of_mine.py" in error_line(refused.err)
    assert refused.err.count("lit-dps: error") == 1 and len(refused.results) == 2, "nothing was run"
    accepted = run(3, "--accept-code-change")
    assert accepted.code == NO_GOAL and len(accepted.results) == 3
    said = (
        r"versions of scales_of_mine.py are in this table: .*2 trials since [\d :-]+, 1 trial since"
    )
    assert re.search(said, in_one_line(accepted.out))
    assert [r.engine for r in accepted.results] == ["lightning"] * 3
    write_points(folder, flipped=7)
    for trials in (4, 3):  # also if no trial remains: the results are no answer for these data
        refused = run(trials)
        assert refused.code == 2 and "the data" in error_line(refused.err)
        assert len(refused.results) == 3, "nothing was run"


@pytest.mark.long
def test_a_study_with_nothing_left_to_run_is_refused_too(study):
    folder, run = study
    assert run(1).code == NO_GOAL
    (folder / "code_of_mine.py").write_text(
        CODE.replace("nn.Linear(5, 2)", "nn.Sequential(nn.Linear(5, 2))")
    )
    assert run(1).code == 2
    accepted = run(1, "--accept-code-change")
    assert accepted.code == NO_GOAL and "versions" not in accepted.out
