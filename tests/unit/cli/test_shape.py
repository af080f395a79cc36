"""A configuration of the wrong shape is refused in our words, before PyTorch is imported."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from lit_dps.cli.command_line import CommandLine
from lit_dps.cli.config_file import parse_config
from lit_dps.cli.key_checks import check_kinds
from lit_dps.core.errors import ConfigError, UserError
from tests.support.errors import refuses

ROOT = Path(__file__).parents[3]
LONG = list(range(1000))


def check(folder: Path, config, *options: str, verb: str = "study") -> None:
    text = config if isinstance(config, str) else yaml.safe_dump(config)
    (folder / "c.yaml").write_text(text)
    check_kinds(CommandLine([verb, "--config", str(folder / "c.yaml"), *options]))


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({"study": [1]}, "study"),
        ({"study": {"batch_sizes": 8}}, "study.batch_sizes"),
        ({"study": {"batch_sizes": ["a"]}}, "study.batch_sizes"),
        ({"study": {"batch_sizes": [[1]]}}, "study.batch_sizes"),
        ({"study": {"space": [1]}}, "study.space"),
        ({"study": {"grid": {"model.x": 3}}}, "study.grid"),
        ({"study": {"trials": None}}, "study.trials"),
        ({"study": {"trials": LONG}}, "study.trials"),
        ({"study": {"name": {"a": 1}}}, "study.name"),
        ({"goal": [0.1]}, "goal"),
        ({"goal": {"error": "abc"}}, "goal.error"),
        ({"goal": {"error": {"low": 1}}}, "goal.error"),
        ({"pruning": {"exclude": "conv"}}, "pruning.exclude"),
        ({"pruning": {"options": [1]}}, "pruning.options"),
        ({"local": {"workers": "x"}}, "local.workers"),
        ({"model": [1]}, "model"),
        ({"model": {"class_path": ["a.B"]}}, "model.class_path"),
        ({"data": {"class_path": "a.B", "init_args": [1]}}, "data.init_args"),
        ({"trainer": ["gpu"]}, "trainer"),
        ({"trainer": {"max_steps": {"a": 1}}}, "trainer.max_steps"),
        ({"storage": {"folder": [1]}}, "storage.folder"),
    ],
)
def test_a_value_of_another_kind_is_refused_by_its_key(config, key, tmp_path):
    with pytest.raises(ConfigError) as caught:
        check(tmp_path, config)
    assert caught.value.key == key and caught.value.allowed
    assert len(str(caught.value)) < 500
    assert not re.search(r"Sequence|Mapping|dict|list\[|int\b|object", caught.value.allowed)


def test_options_are_checked_alike(tmp_path):
    for option in (["--study.batch_sizes", "8"], ["--study.batch_sizes=8"]):
        with pytest.raises(ConfigError) as caught:
            check(tmp_path, {}, *option)
        assert (caught.value.key, caught.value.value) == ("study.batch_sizes", 8)


def test_a_storage_url_in_the_wrong_place_is_not_shown(tmp_path):
    with pytest.raises(ConfigError) as caught:
        check(tmp_path, {"storage": {"optuna": ["postgresql://me:hidden@host/db"]}})
    assert "hidden" not in str(caught.value)


@pytest.mark.parametrize("text", ["[1, 2]", "3", "a word"])
def test_what_is_no_mapping_is_no_configuration(text, tmp_path):
    with refuses(str(tmp_path / "c.yaml"), error=UserError):
        check(tmp_path, text)


@pytest.mark.parametrize(
    "config",
    [
        {
            "study": {
                "race_factor": None,
                "goals": ["1e-3", 0.2],
                "space": {"model.lr": {"low": "1e-3", "high": 1}},
            }
        },
        {
            "study": {
                "grid": {"model.x": [1, "a", 0.5, True]},
                "workers": None,
                "repeat_slack": None,
            }
        },
        {
            "goal": {"error": "1e-2"},
            "smoothness": {"interval": None},
            "trainer": {"devices": "auto", "logger": False},
        },
        {
            "trainer": {
                "callbacks": [{"class_path": "a.B"}],
                "precision": "16-mixed",
                "limit_val_batches": 0.5,
            }
        },
        {
            "model": "a.B",
            "data": {"class_path": "a.B", "init_args": {"x": [1]}},
            "study": "study.yaml",
        },
        "",
    ],
)
def test_what_serves_passes(config, tmp_path):
    check(tmp_path, config)


@pytest.mark.parametrize(
    "file", sorted((ROOT / "configs").rglob("*.yaml")), ids=lambda path: path.stem
)
def test_the_configurations_of_the_package_pass(file):
    check_kinds(CommandLine(["study", "--config", str(file)]))


def test_a_slip_is_told_by_file_line_and_column_without_pytorch(tmp_path):
    (tmp_path / "c.yaml").write_text("study:\n  name: [x\n  trials: 3\n")
    code = (
        "import sys; from lit_dps.cli import main; code = main(['study', 'c.yaml']);"
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    began = time.process_time()
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert time.process_time() - began < 1
    assert done.returncode == 2
    assert "c.yaml, line 3, column " in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("goal: {error: 0.1}\ngoal: {max_steps: 32}\n", "goal"),
        ("study:\n  trials: 6\n  trials: 7\n", "study.trials"),
        ("study: {trials: 6}\nstudy.trials: 9\n", "study.trials"),
        ("study.trials: 9\nstudy: {trials: 6}\n", "study.trials"),
        ("model: {init_args: {lr: 1, lr: 2}}\n", "lr"),
        ("study: {space: {model.lr: {low: 1, low: 2}}}\n", "low"),
    ],
)
def test_a_key_that_is_there_twice_is_refused(text, key):
    with refuses(key, error=UserError):
        parse_config(text, "a.yaml")


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("study: {null: 6}\n", "study.null"),
        ("study: {1: 6}\n", "study.1"),
        ("null: {trials: 6}\n", "null"),
        ("study: {grid: &a {optim.delay: *a}}\n", "a.yaml, line 1"),
    ],
)
def test_a_key_that_is_no_text_and_an_endless_anchor_are_refused(text, key):
    with refuses(key, error=UserError):
        parse_config(text, "a.yaml")


def test_an_anchor_may_be_used_twice_and_merged():
    text = "goal: &g {error: 0.1}\nx: *g\ny: {<<: *g, max_steps: 32}\n"
    content = parse_config(text, "a.yaml").content
    assert content["x"] == {"error": 0.1} and content["y"] == {"error": 0.1, "max_steps": 32}
