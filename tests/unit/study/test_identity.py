"""Identities of shipped and stored studies are as recorded, so that these studies can go on."""

from __future__ import annotations

import json
import lzma
from pathlib import Path

import pytest

from lit_dps.cli.study import read_setup
from lit_dps.core.config import StorageConfig, StudyConfig
from lit_dps.storage.format_1 import convert_config, convert_identity
from lit_dps.study.setup import StudySetup
from lit_dps.training.workload import Workload
from tests.e2e.commands import ROOT
from tests.support.setups import sections

# Configurations and identities of the files in configs/ and of the studies in docs/replication/.
# Recorded once; a recorded identity must never change.
RECORDED = json.loads(lzma.decompress(Path(__file__).with_name("identities.json.xz").read_bytes()))
# Arguments of the module that were added later, with their defaults.
ADDED = {"adamw_ratio": 1.0, "warmup_steps": 0, "decay_share": 0.2, "refresh_steps": 10}
SECTIONS = ("goal", "pruning", "smoothness", "optim", "local")


def rebuilt(config: dict) -> StudySetup:
    config = convert_config(config)
    study = StudyConfig(**config["study"])
    workload = Workload(config["model"], config["data"], config["trainer"], study.batch_size_key)
    common = {name: config[name] for name in SECTIONS if name in config}
    return StudySetup(study, StorageConfig(), workload, **sections(**common))


@pytest.mark.parametrize("name", RECORDED)
def test_the_identity_is_as_recorded(name):
    recorded = RECORDED[name]
    identity = json.loads(json.dumps(rebuilt(recorded["config"]).identity(None)))
    assert identity == convert_identity(recorded["identity"])


@pytest.mark.parametrize(
    "file", ["configs/quickstart.yaml", "configs/mnist-simple-cnn-momentum-linear.yaml"]
)
def test_the_command_reads_a_file_as_recorded(file):
    setup = read_setup(["--config", str(ROOT / file)])
    config = json.loads(json.dumps(setup.config()))
    assert config["study"].pop("statistic") == "minimum", "a key that was added later"
    for name, default in ADDED.items():
        assert config["model"]["init_args"].pop(name) == default
    assert config == convert_config(RECORDED[file]["config"])


def test_only_another_statistic_than_the_minimum_is_part_of_the_identity():
    of_default = read_setup(["--config", str(ROOT / "configs/quickstart.yaml")])
    assert "statistic" not in of_default.identity(None)["study"]
    arguments = ["--study.statistic", "median_of_best_3"]
    other = read_setup(["--config", str(ROOT / "configs/quickstart.yaml"), *arguments])
    assert other.identity(None)["study"]["statistic"] == "median_of_best_3"


def test_the_lipschitz_reading_has_one_identity_in_both_places():
    config = ["--config", str(ROOT / "configs/quickstart.yaml")]
    section = read_setup([*config, "--smoothness.interval", "8", "--smoothness.last", "0.9"])
    reading = {"class_path": "lipschitz", "init_args": {"interval": 8, "last": 0.9}}
    named = read_setup([*config, "--study.readings", json.dumps([reading])])
    assert named.identity(None) == section.identity(None)
    assert named.config() == section.config()
    assert (named.smoothness.interval, named.study.readings) == (8, [])
