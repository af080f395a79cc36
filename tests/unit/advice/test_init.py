"""init: what it finds in a file, what it proposes, and what it refuses."""

from __future__ import annotations

import math
import re
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import yaml
from jsonargparse import get_loader
from lightning import LightningDataModule, LightningModule
from torch.utils.data import DataLoader, TensorDataset

from lit_dps.advice.code_inspection import import_file, look_at
from lit_dps.advice.progress_run import ROUGH_STEPS, ProgressRun, run_progress
from lit_dps.advice.proposed_config import (
    ProposedGoal,
    batch_sizes_around,
    choose_metric,
    config_text,
    propose_goal,
)
from lit_dps.cli import main
from lit_dps.cli.study import read_setup
from lit_dps.core.errors import UserError
from tests.support.errors import refusals_in, refuses

CODE = '''
import torch
from lightning import LightningDataModule, LightningModule
from torch.utils.data import DataLoader, TensorDataset


class Base(LightningModule):
    """Has no training_step."""


class Net(Base):
    def __init__(self, width: int = 4, eta: float = 0.05):
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return (self.layer(x) - y).square().mean()

    def validation_step(self, batch, batch_idx):
        x, y = batch
        loss = (self.layer(x) - y).square().mean()
        self.log("val_loss", loss)
        self.log("val_acc", (loss < 0.5).float())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), self.hparams.eta)


class Data(LightningDataModule):
    def __init__(self, bs: int = 8, seed: int = 0):
        super().__init__()
        self.bs = bs
        x = torch.randn(256, 4, generator=torch.Generator().manual_seed(seed))
        y = x.sum(1, keepdim=True) + 0.1 * x[:, :1] ** 2
        self.train, self.val = TensorDataset(x[:192], y[:192]), TensorDataset(x[192:], y[192:])

    def train_dataloader(self):
        return DataLoader(self.train, self.bs, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, 64)
'''
NO_CHOICE = dict.fromkeys(("model", "data", "batch_size_key", "rate_key"))


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Returns a function that writes a module of a name and returns its file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    names = []

    def write(name: str, text: str) -> Path:
        names.append(name)
        file = tmp_path / f"{name}.py"
        file.write_text(textwrap.dedent(text))
        return file

    yield write
    for name in names:
        file = getattr(sys.modules.get(name), "__file__", None)
        if file is not None and Path(file).parent == tmp_path:
            del sys.modules[name]


def found(file: Path, **choices: str):
    return look_at(import_file(file), {**NO_CHOICE, **choices})


# ---- The code ----


def test_classes_and_keys_of_a_file(write):
    code = found(write("init_found", CODE), rate_key="model.eta")
    assert code.module.__name__ == "Net" and code.data.__name__ == "Data"
    assert (code.batch_size_key, code.batch_size) == ("data.bs", 8)
    assert (code.rate_key, code.rate) == ("model.eta", 0.05)


def test_several_candidates_are_asked_for(write):
    text = CODE + "\n\nclass Other(Base):\n    training_step = Net.training_step\n"
    file = write("init_several", text)
    with refuses("--model") as refused:
        found(file, rate_key="eta")
    fields = f"{refused.value.allowed} {refused.value.hint}"
    assert "Net, Other" in fields and "--model Net" in fields
    with refuses("--rate-key"):
        found(file, model="Other", rate_key="eta")  # the arguments of LightningModule
    with refuses("--model", "Base"):
        found(file, model="Base")
    with refuses("--rate-key") as refused:
        found(file, model="Net")
    assert {"model.width", "model.eta"} <= set(re.findall(r"model\.\w+", str(refused.value)))
    with refuses("--batch-size-key", "data.b"):
        found(file, model="Net", rate_key="eta", batch_size_key="data.b")


def test_the_only_class_that_no_other_extends_is_taken(write):
    text = CODE + "\n\nclass Wide(Net):\n    pass\n\n\nclass Wider(Wide):\n    pass\n"
    file = write("init_leaf", text)
    assert found(file, rate_key="eta").module.__name__ == "Wider"
    assert found(file, rate_key="eta", model="Net").module.__name__ == "Net"
    two = write("init_leaves", text + "\n\nclass Other(Net):\n    pass\n")
    with refuses("--model", None) as refused:
        found(two, rate_key="eta")
    assert "--model Wider" in refused.value.hint


def test_what_is_missing_is_refused(write, tmp_path):
    with refuses("--data", None):
        found(write("init_no_data", CODE.partition("class Data")[0]))
    with refuses("--model", "Net") as refused:
        found(write("init_no_default", CODE.replace("width: int = 4", "width: int")))
    assert "width" in refused.value.allowed
    with refuses("FILE"):
        import_file(tmp_path / "none.py")
    with refuses("FILE", "math.py"):
        import_file(write("math", CODE))
    with refuses("FILE", error=UserError) as refused:
        import_file(write("init_broken", "x = 1 / 0"))
    assert "ZeroDivisionError" in str(refused.value) and "line 1" in str(refused.value)


# ---- The proposal ----


def run_of(values: list[float], first: float, metric: str = "val_loss") -> ProgressRun:
    steps = [10 * (i + 1) for i in range(len(values))]
    return ProgressRun({metric: first}, steps, {metric: values}, 0.01, 0.01, 10 * len(steps))


def test_the_goal_is_at_nine_tenths_of_the_progress_or_half_of_the_steps():
    # Progress slows down: 9 / 10 of it, 2.0 to 0.2, are at step 40.
    values = [1.0, 0.6, 0.3, 0.18, 0.1, 0.05, 0.02, 0.01, 0.005, 0.0]
    goal = propose_goal(run_of(values, 2.0), "val_loss")
    assert goal.value == pytest.approx(0.2) and goal.steps == 40 and not goal.at_least
    assert goal.check_interval == 2 and goal.max_steps == 320
    # Progress is steady: half of the steps are easier.
    steady = [2.0 - 0.1 * (i + 1) for i in range(10)]
    goal = propose_goal(run_of(steady, 2.0), "val_loss")
    assert goal.value == pytest.approx(1.5) and goal.steps == 50
    rising = [0.1 + 0.08 * (i + 1) for i in range(10)]
    goal = propose_goal(run_of(rising, 0.1, "val_acc"), "val_acc")
    assert goal.at_least and goal.value == pytest.approx(0.5) and goal.steps == 50
    noisy = [1.0, math.nan, 0.2, 0.9, 0.2, 0.2]
    assert propose_goal(run_of(noisy, 2.0), "val_loss").steps == 30


def test_no_progress_is_refused():
    for values in ([2.0, 2.1], [math.nan], []):
        with refuses("--seconds", error=UserError):
            propose_goal(run_of(values, 2.0), "val_loss")


def test_a_loss_is_preferred_and_others_are_named():
    run = ProgressRun({"val_acc": 0.1, "val_loss": 2.0})
    assert choose_metric(run, None) == ("val_loss", ["val_acc"])
    assert choose_metric(run, "val_acc") == ("val_acc", ["val_loss"])
    with refuses("--metric", "val_error"):
        choose_metric(run, "val_error")


def test_batch_sizes_are_within_the_data():
    assert batch_sizes_around(32, None) == [8, 32, 128, 512]
    assert batch_sizes_around(32, 200) == [8, 32, 128]
    assert batch_sizes_around(1, 1) == [1]


PLAIN = ["val_loss", "val/loss", "val-loss.1"]
QUOTED = ["val: loss", "val #loss", "- loss", "null", "on", "1e5", "1", "'a\"", "{a}", "a\nb", "é"]


@pytest.mark.parametrize("name", PLAIN + QUOTED)
def test_a_name_is_read_as_it_is_written(name, write):
    code = found(write("init_names", CODE), rate_key="eta")
    run = run_of([1.0, 0.5, 0.2, 0.1], 2.0, name)
    goal = propose_goal(run, name)
    text = config_text("init_names.yaml", "init_names", code, run, goal, [name], None)
    # The loader of the commands reads 1e5 as a number.
    for load in (yaml.safe_load, get_loader("yaml")):
        assert load(text)["goal"] == {
            "metric": name,
            "at_most": goal.value,
            "check_interval": goal.check_interval,
            "max_steps": goal.max_steps,
        }
    assert (f"  metric: {name}\n" in text) == (name in PLAIN)


@pytest.mark.parametrize("file", ["1e5", "runs/null", "a: b"])
def test_the_name_of_the_study_is_the_name_of_the_file(file, write):
    code = found(write("init_study", CODE), rate_key="eta")
    goal = ProposedGoal("val_loss", 0.5, False, 10, 1, 80)
    text = config_text(f"{file}.yaml", "init_study", code, run_of([1.0], 2.0), goal, [], None)
    for load in (yaml.safe_load, get_loader("yaml")):
        assert load(text)["study"]["name"] == file.removeprefix("runs/")


@pytest.mark.parametrize("value", [1e-5, 3.1e-5, 2e7, 0.25, 3.0])
def test_a_number_is_read_as_a_number(value, write):
    code = found(write("init_numbers", CODE), rate_key="eta")._replace(rate=32 * value)
    goal = ProposedGoal("val_loss", value, False, 10, 1, 80)
    run = run_of([1.0], 2.0)
    config = yaml.safe_load(config_text("a.yaml", "init_numbers", code, run, goal, [], None))
    assert config["goal"]["at_most"] == value
    assert config["study"]["space"]["model.eta"]["low"] == value


# ---- The command ----


class TwoOptimizers(LightningModule):
    """Steps two optimizers in each batch."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.first, self.second = torch.nn.Linear(4, 2), torch.nn.Linear(2, 1)
        self.batches = 0

    def training_step(self, batch, batch_idx):
        self.batches += 1
        self.manual_backward(self.second(self.first(batch[0])).square().mean())
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.second(self.first(batch[0])).square().mean())

    def configure_optimizers(self):
        return [torch.optim.SGD(each.parameters(), 0.1) for each in (self.first, self.second)]


class Random(LightningDataModule):
    def __init__(self):
        super().__init__()
        self.data = TensorDataset(torch.randn(64, 4))

    def train_dataloader(self):
        return DataLoader(self.data, 8)

    def val_dataloader(self):
        return DataLoader(self.data, 64)


def test_a_step_is_a_batch_of_a_module_with_several_optimizers():
    modules = []

    def make_module() -> TwoOptimizers:
        modules.append(TwoOptimizers())
        return modules[-1]

    run = run_progress(make_module, Random, 0.2)
    assert modules[1].batches == ROUGH_STEPS
    assert run.total_steps == modules[-1].batches >= run.steps[-1] > 0


def test_the_file_is_accepted_as_it_is_and_never_overwritten(write, tmp_path, capsys):
    write("init_command", CODE)
    words = ["init", "init_command.py", "--rate-key", "eta", "--seconds", "0.5"]
    assert main(words) == 0
    captured = capsys.readouterr()
    assert "model Net with model.eta = 0.05, data Data with data.bs = 8" in captured.err
    file = tmp_path / "init_command.yaml"
    config = yaml.safe_load(file.read_text())
    assert config["model"] == {"class_path": "init_command.Net"}
    assert config["study"]["batch_size_key"] == "data.bs"
    assert config["study"]["batch_sizes"] == [2, 8, 32, 128]
    goal = config["goal"]
    assert goal["metric"] == "val_loss" and 0 < goal["at_most"] < 4
    assert goal["max_steps"] % goal["check_interval"] == 0
    space = config["study"]["space"]["model.eta"]
    assert space["low"] == pytest.approx(0.05 / 32, rel=0.05)
    assert "Others: val_acc." in file.read_text()
    setup = read_setup(["--config", str(file)])
    assert setup.study.name == "init_command" and setup.goal.max_steps == goal["max_steps"]
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix) == [
        "init_command.py",
        "init_command.yaml",
    ]
    assert main(["validate", "--config", str(file)]) == 0
    capsys.readouterr()
    before = file.read_text()
    assert main(words) == 2
    assert refusals_in(capsys.readouterr().err) == [("--output", "'init_command.yaml'")]
    assert file.read_text() == before


@pytest.mark.parametrize(
    ("change", "key"),
    [
        (('self.log("val_loss", loss)', "pass"), None),
        (("return (self", "raise RuntimeError('no') # (self"), "RuntimeError: no"),
    ],
)
def test_code_that_fails_is_refused_in_one_line(change, key, write, tmp_path, capsys):
    text = CODE.replace(*change).replace('self.log("val_acc", (loss < 0.5).float())', "pass")
    write("init_fails", text)
    assert main(["init", "init_fails.py", "--rate-key", "eta", "--seconds", "0.2"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("lit-dps: error: ")
    assert (key or "validation logs no metric") in error
    assert not (tmp_path / "init_fails.yaml").exists()
