"""The verbs as a user types them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import mlflow
import numpy as np
import pytest
import torch
import yaml

from lit_dps.core.attempt import Attempt
from lit_dps.core.exit_codes import ExitCode
from lit_dps.core.trial import Trial
from lit_dps.pruning import isometry
from lit_dps.storage.samplers import sobol_point
from tests.e2e.commands import FAST, ROOT, environment, run
from tests.support.setups import check

BLOCK = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ImportError("blocked: " + name)
sys.meta_path.insert(0, Block())
from lit_dps.cli import main
sys.exit(main({argv!r}))
"""


def run_without(blocked: set[str], folder: Path, *argv: str) -> subprocess.CompletedProcess:
    """Runs a command in an interpreter that cannot import some packages."""
    code = BLOCK.format(blocked=blocked, argv=list(map(str, argv)))
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_help_imports_nothing_that_takes_time(tmp_path):
    heavy = {
        "torch",
        "lightning",
        "optuna",
        "mlflow",
        "jsonargparse",
        "yaml",
        "numpy",
        "scipy",
        "matplotlib",
    }
    done = run_without(heavy, tmp_path, "--help")
    assert done.returncode == 0, done.stderr
    for verb in ("fit", "validate", "test", "study", "analyze", "ui"):
        assert f"\n  {verb} " in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["fit", "study", "analyze"])
def test_every_verb_has_help(tmp_path, verb):
    done = run(tmp_path, verb, "--help-all")
    assert done.returncode == 0
    for option in ("--study.batch_sizes", "--storage.optuna", "--config"):
        assert option in done.stdout


@pytest.mark.slow
def test_fit_validate_and_test_one_trial(tmp_path):
    quiet = ("--trainer.enable_progress_bar", "false")
    trial = (
        "--pruning.sparsity",
        "0.5",
        "--data.batch_size",
        "16",
        "--model.learning_rate",
        "0.02",
    )
    fitted = run(tmp_path, "fit", "--config", FAST, *trial, *quiet, "--smoothness.interval", "4")
    assert fitted.returncode == 0, fitted.stderr
    assert "complete after " in fitted.stdout
    error = float(fitted.stdout.rsplit("val_error ", 1)[1].split()[0])
    assert error <= 0.2

    (checkpoint,) = (tmp_path / "mlruns").rglob("*.ckpt")
    validated = run(tmp_path, "validate", "--config", FAST, "--ckpt_path", checkpoint, *quiet)
    assert validated.returncode == 0, validated.stderr
    shown = next(line for line in validated.stdout.splitlines() if "val_error" in line)
    assert float(shown.strip(" │\n").split()[-1]) == pytest.approx(error, abs=1e-4)
    tested = run(tmp_path, "test", "--config", FAST, "--ckpt_path", checkpoint, *quiet)
    assert "test_error" in tested.stdout

    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlruns/mlflow.db")
    (logged,) = client.search_runs([e.experiment_id for e in client.search_experiments()])
    assert logged.data.metrics["val_error"] == pytest.approx(error, abs=1e-4)
    assert logged.data.metrics["lipschitz"] > 0
    assert [item.path for item in client.list_artifacts(logged.info.run_id)] == ["config.yaml"]


@pytest.mark.slow
def test_printed_config_is_a_config(tmp_path):
    printed = run(tmp_path, "study", "--config", FAST, "--study.trials", "1", "--print_config")
    (tmp_path / "printed.yaml").write_text(printed.stdout)
    again = run(tmp_path, "study", "--config", "printed.yaml", "--print_config")
    assert yaml.safe_load(printed.stdout) == yaml.safe_load(again.stdout)
    assert yaml.safe_load(again.stdout)["study"]["trials"] == 1
    assert "forecast" not in yaml.safe_load(again.stdout), (
        "what to do is no part of a configuration"
    )


@pytest.mark.slow
def test_analyze_needs_neither_torch_nor_mlflow_and_repeats_the_study(tmp_path):
    done = run(tmp_path, "study", "--config", FAST, "--study.trials", 2)
    assert done.returncode == 0, done.stderr
    analyzed = run_without(
        {"torch", "lightning", "mlflow", "torchvision"}, tmp_path, "analyze", "--config", str(FAST)
    )
    assert analyzed.returncode == 0, analyzed.stderr
    assert analyzed.stdout.strip() in done.stdout
    elsewhere = run(tmp_path, "analyze", "--study.name", "fast", "--output", "here")
    assert elsewhere.returncode == 0, elsewhere.stderr
    assert {path.name for path in (tmp_path / "here").iterdir()} >= {
        "scaling.png",
        "metaparameters.png",
        "table.csv",
    }


def _idx(path: Path, array: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    header = bytes([0, 0, 8, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape)
    path.write_bytes(header + array.astype(np.uint8).tobytes())


@pytest.fixture(scope="module")
def small_data(tmp_path_factory) -> Path:
    """Data sets of a few made-up images in the layouts of the real ones."""
    import io

    import pyarrow
    import pyarrow.parquet
    from PIL import Image

    root, rng = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    for name in ("MNIST", "FashionMNIST"):
        for part, n in (("train", 60), ("t10k", 10)):
            _idx(
                root / name / "raw" / f"{part}-images-idx3-ubyte", rng.integers(0, 256, (n, 28, 28))
            )
            _idx(root / name / "raw" / f"{part}-labels-idx1-ubyte", rng.integers(0, 10, n))
    (root / "cifar10").mkdir()
    for part, n in (("train", 60), ("test", 10)):
        rows = []
        for image in rng.integers(0, 256, (n, 32, 32, 3), dtype=np.uint8):
            file = io.BytesIO()
            Image.fromarray(image).save(file, "PNG")
            rows.append({"bytes": file.getvalue(), "path": None})
        table = pyarrow.table({"img": rows, "label": rng.integers(0, 10, n)})
        pyarrow.parquet.write_table(table, root / "cifar10" / f"{part}.parquet")
    return root


CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
SHIPPED = sorted((ROOT / "configs").rglob("*.yaml"))
# Their workloads are those of other files, with other numbers.
VARIANTS = (
    "-exhaustive",
    "-constant",
    "-linear",
    "-100",
    "-levels",
    "-region",
    "-winners",
    "-sgd",
    "masks",
)
STUDIED = [
    "mnist-simple-cnn-momentum",
    "fashion-mnist-simple-cnn-sgd-linear",
    "cifar-10-resnet-8-nesterov-constant",
]


def is_variant(config: Path) -> bool:
    return config.stem.endswith(VARIANTS)


def little(config: Path, data: Path) -> list[str]:
    """Options that leave of a file one trial of one check interval on a few images."""
    content = yaml.safe_load(config.read_text())
    interval, workers = (
        content["goal"]["check_interval"],
        content.get("local", {}).get("workers", 1),
    )
    sparsity = 0.9
    # Advice is of dense networks. The quadratic has nothing to prune.
    if config.parent.name == "advice" or content["model"]["class_path"].endswith("NoisyQuadratic"):
        sparsity = 0.0
    options = ["--study.batch_sizes", f"[{max(2, workers)}]", "--study.sparsities", f"[{sparsity}]"]
    options += ["--study.trials", "1", "--study.workers", "1", "--goal.max_steps", str(interval)]
    space = (
        []
        if "space" in content["study"]
        else ["--study.space", "{model.lr: {low: 0.01, high: 0.1}}"]
    )  # of advise
    if content["data"]["class_path"] in (
        "norm_images.SmallImages",
        "lit_dps.data.MNIST",
        "lit_dps.data.FashionMNIST",
        "lit_dps.data.CIFAR10",
    ):
        options += ["--data.root", str(data)]
    if "batch" in content:
        # A run of one example, so that the batch has its whole size at the second step.
        options += ["--batch.options", "{start: 0.5, examples: 1}"]
    if "train_examples" in content["data"].get("init_args", {}):
        options += ["--data.train_examples", "50"]
    return ["study", "--config", str(config), *options, *space, "--trainer.accelerator", "cpu"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        pytest.param(path, id=path.stem, marks=[pytest.mark.long] if is_variant(path) else [])
        for path in SHIPPED
    ],
)
def test_every_shipped_config_trains(config, small_data, tmp_path, monkeypatch):
    """Each file passes the checks before a study and trains a trial; studies and figures would take
    a minute more."""
    from lit_dps.cli.study import read_setup

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(isometry, "MAX_HALVINGS", 1)  # its end has tests of its own
    monkeypatch.syspath_prepend(config.parent)  # modules that lie beside it
    setup = read_setup(little(config, small_data)[1:])
    study = setup.study
    torch.set_num_threads(study.threads)
    check(setup)
    point = sobol_point(study.space, study.seed, 0, study.scramble)
    run = Attempt(Trial(setup.cells[0], 0, point, study.seed), setup.built_goal)
    runs = iter([run])
    (result,) = setup.engine().train(lambda: next(runs, None))
    assert result.steps_run == setup.built_goal.check_interval
    kept, total = (
        (sum(counts) for counts in zip(*result.kept.values(), strict=True))
        if result.kept
        else (0, 0)
    )
    density = 0.1
    if config.stem == "moving-masks":
        density = 1.0  # its first method begins dense
    assert (kept, bool(kept)) == (round(density * total), bool(setup.cells[0].sparsity))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", STUDIED)
def test_a_shipped_config_of_each_data_set_is_studied_and_analyzed(
    name, small_data, tmp_path, monkeypatch, capsys
):
    from lit_dps.cli import main

    config = ROOT / "configs" / f"{name}.yaml"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["lit-dps"])
    assert main(little(config, small_data)) == ExitCode.NO_RESULT
    assert main(["analyze", "--config", str(config)]) == ExitCode.NO_RESULT
    assert "missed goal" in capsys.readouterr().out
    folders = {path.name for path in (tmp_path / "mlruns" / "figures" / name).glob("goal-*")}
    assert folders == ({"goal-0.14"} if name.startswith("fashion") else set())


WORKLOADS = {
    "mnist-simple-cnn": ("MNIST", "SimpleCNN"),
    "fashion-mnist-simple-cnn": ("FashionMNIST", "SimpleCNN"),
    "cifar-10-resnet-8": ("CIFAR10", "ResNet8"),
}
GOALS = {
    "MNIST": {"error": 0.02, "check_interval": 16, "max_steps": 40_000},
    "FashionMNIST": {"error": 0.12, "check_interval": 16, "max_steps": 40_000},
    "CIFAR10": {"error": 0.4, "check_interval": 32, "max_steps": 100_000},
}
RATE = {"model.learning_rate": {"low": 1e-4, "high": 1.0, "scale": "log"}}
MOMENTUM = {"model.momentum": {"low": 0.9, "high": 0.9999, "scale": "reverse_log"}}
DECAY = {
    "model.decay_steps": {"low": 30_000, "high": 60_000, "integer": True},
    "model.end_factor": {"low": 1e-4, "high": 0.1, "scale": "log"},
}


def name_of(workload: str, rule: str, schedule: str) -> str:
    first = (
        "linear" if workload.startswith("cifar") else "constant"
    )  # in the paper: it is not named
    return f"{workload}-{rule}" + ("" if schedule == first else f"-{schedule}")


@pytest.mark.parametrize("schedule", ["constant", "linear"])
@pytest.mark.parametrize("rule", ["sgd", "momentum", "nesterov"])
@pytest.mark.parametrize("workload", WORKLOADS)
def test_there_is_a_config_for_each_workload_of_the_paper(workload, rule, schedule):
    """Lee et al. (2021), Section 2 and Appendix D."""
    name, (data, network) = name_of(workload, rule, schedule), WORKLOADS[workload]
    config = yaml.safe_load((ROOT / "configs" / f"{name}.yaml").read_text())
    model = config["model"]["init_args"]
    assert model["network"] == {"class_path": f"lit_dps.models.{network}"}
    assert (model["optimizer"], model["schedule"]) == (rule, schedule)
    assert (config["data"]["class_path"], config["goal"]) == (f"lit_dps.data.{data}", GOALS[data])
    assert config["study"] == {
        "name": name,
        "batch_sizes": [2**i for i in range(1, 15)],
        "sparsities": [0.0, 0.5, 0.7, 0.9],
        "trials": 100,
        **({"goals": [0.14]} if data == "FashionMNIST" else {}),
        "space": RATE
        | (MOMENTUM if rule != "sgd" else {})
        | (DECAY if schedule == "linear" else {}),
    }


def test_there_are_no_other_configs():
    rules, schedules = ("sgd", "momentum", "nesterov"), ("constant", "linear")
    names = {
        name_of(w, rule, schedule) for w in WORKLOADS for rule in rules for schedule in schedules
    }
    assert {path.stem for path in CONFIGS} == names | {"quickstart"}


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_makefile_names_the_documented_targets():
    text, readme = ((ROOT / name).read_text() for name in ("Makefile", "README.md"))
    for target in ("study", "test", "ui"):
        assert f"\n{target}:" in text
        assert f"make {target}" in readme
