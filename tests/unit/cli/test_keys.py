"""A mistyped key is refused before torch is imported, with what was meant; what is right is let
through."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest
from lightning.pytorch import Trainer

from lit_dps.cli.command_line import CommandLine
from lit_dps.cli.fit import CALLBACKS
from lit_dps.cli.key_checks import check_names, sections
from lit_dps.core.errors import UserError
from lit_dps.core.trial_config import TRIAL_SECTIONS, OptimConfig
from lit_dps.readings.lipschitz import Lipschitz
from lit_dps.training import AverageCallback, DelayCallback
from tests.e2e.commands import FAST, ROOT
from tests.support.errors import refuses


def refuse_unknown(words: list[str], verb: str = "study") -> None:
    check_names(CommandLine([verb, *words]))


# `optim` has two callbacks, each with one key.
ONE_CALLBACK = {key: kind for key, kind in CALLBACKS.items() if key != "optim"}


def test_keys_read_from_source_are_the_arguments():
    found = sections()
    classes = {**ONE_CALLBACK, "smoothness": Lipschitz, "trainer": Trainer, "optim": OptimConfig}
    for section, cls in classes.items():
        assert found[section] == set(inspect.signature(cls).parameters), section


def test_callbacks_take_the_keys_of_their_sections():
    assert DelayCallback().delay == OptimConfig().delay
    assert AverageCallback().half_life == OptimConfig().average_half_life
    for section, callback in {**ONE_CALLBACK, "smoothness": Lipschitz}.items():
        arguments = inspect.signature(callback).parameters.values()
        keys = inspect.signature(TRIAL_SECTIONS[section]).parameters.values()
        assert [each.name for each in arguments] == [each.name for each in keys]
        for argument, key in zip(arguments, keys, strict=True):
            if (section, key.name) != ("smoothness", "interval"):  # a study measures it on request
                assert argument.default == key.default, f"{section}.{key.name}"


@pytest.mark.parametrize(
    "file", sorted((ROOT / "configs").rglob("*.yaml")), ids=lambda path: path.stem
)
def test_shipped_configs_are_let_through(file):
    refuse_unknown(
        [
            "--config",
            str(file),
            "--model.learning_rate=0.1",
            "--trainer.callbacks+",
            "x",
            "--forecast",
        ]
    )


@pytest.mark.parametrize(
    ("argv", "key", "meant"),
    [
        (["--study.trialss", "2"], "study.trialss", "--study.trials?"),
        (["--goal.eror=0.1"], "goal.eror", "--goal.error?"),
        (["--trainer.acelerator", "cpu"], "trainer.acelerator", "--trainer.accelerator?"),
        (["--studdy.trials", "2"], "studdy", "--study?"),
        (["--nothing.like.it", "2"], "nothing", None),
        (["--pruning.methods.x", "2"], "pruning.methods", "--pruning.method?"),
    ],
)
def test_mistyped_options_are_refused_with_what_was_meant(argv, key, meant):
    with refuses(key, error=UserError) as refused:
        refuse_unknown(["--config", str(FAST), *argv])
    hint = refused.value.hint
    assert (hint and hint.split()[-1]) == meant


def test_advise_takes_its_own_options_and_refuses_those_of_a_study():
    options = [
        "--budget",
        "1m",
        "--method=branch",
        "--devices",
        "1,2",
        "--price",
        "2",
        "--engine",
        "x",
    ]
    refuse_unknown(["--config", str(FAST), *options], "advise")
    for option, key, meant in (
        ("--buget", "buget", "--budget"),
        ("--studdy.name", "studdy", "--study"),
    ):
        with refuses(key, 1, error=UserError) as refused:
            refuse_unknown([option, "1"], "advise")
        assert meant in refused.value.hint
    for option in ("--forecast", "--extend-space"):
        with refuses(option.removeprefix("--"), None, error=UserError):
            refuse_unknown([option], "advise")


@pytest.mark.parametrize(
    ("section", "key"), [("study", "trails"), ("storage", "optuna_url"), ("smoothness", "every")]
)
def test_mistyped_keys_of_a_file_are_refused(tmp_path, section, key):
    (tmp_path / "typo.yaml").write_text(f"{section}:\n  {key}: 1\n")
    with refuses(f"{section}.{key}", 1, error=UserError):
        refuse_unknown([f"--config={tmp_path}/typo.yaml"])


@pytest.mark.parametrize("text", ["", "study: null", "study: [1]", "seed_everything: false"])
def test_sections_that_are_no_mapping_have_no_keys(tmp_path, text):
    (tmp_path / "odd.yaml").write_text(text)
    refuse_unknown(["--config", str(tmp_path / "odd.yaml")])


@pytest.mark.parametrize(("text", "key"), [("1: 2\n", "1"), ("study: {1: 2}", "study.1")])
def test_keys_that_are_no_text_are_refused(tmp_path, text, key):
    (tmp_path / "odd.yaml").write_text(text)
    with refuses(key, error=UserError):
        refuse_unknown(["--config", str(tmp_path / "odd.yaml")])


@pytest.mark.parametrize("text", ["[1", "- a", "\xff", "a: 0x_"])
def test_a_file_that_is_no_configuration_is_refused_with_its_name(tmp_path, text):
    (tmp_path / "odd.yaml").write_bytes(text.encode("latin-1"))
    with refuses(str(tmp_path / "odd.yaml"), error=UserError):
        CommandLine(["study", "--config", str(tmp_path / "odd.yaml")])


def test_a_typo_is_refused_without_torch(tmp_path):
    code = (
        "import sys; from lit_dps.cli import main; code = main(sys.argv[1:]); sys.exit(code + "
        "('torch' in sys.modules))"
    )
    argv = [sys.executable, "-c", code, "study", "--config", str(FAST), "--study.trialss", "2"]
    done = subprocess.run(
        argv, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.returncode == 2, done.stderr
    assert "--study.trialss: " in done.stderr and done.stderr.endswith(" --study.trials?\n")
    assert done.stderr.count("\n") == 1
