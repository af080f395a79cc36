"""What may be written shorter on a command line: a file, and keys with dots below study.space and
study.grid."""

from __future__ import annotations

import json
import math
import pickle
import re
from argparse import ArgumentParser
from pathlib import Path

import pytest
import yaml
from jsonargparse import ActionConfigFile, Namespace

from lit_dps.cli import main
from lit_dps.cli.command_line import CommandLine
from lit_dps.cli.config_file import check_is_file
from lit_dps.cli.fit import _checkpoint_option
from lit_dps.cli.migrate import report
from lit_dps.cli.parser import CommandParser, likely_meant
from lit_dps.core.aliases import warn_of_former_name
from lit_dps.core.config import StudyConfig
from lit_dps.core.config_yaml import ConfigLoader
from lit_dps.core.errors import UserError
from lit_dps.storage.migrate import Migration
from tests.e2e.commands import FAST
from tests.support.errors import error_line, refusals_in, refuses
from tests.support.fake_study import law_study

SPACE = {
    "model.learning_rate": {"low": 1e-3, "high": 0.3, "scale": "log"},
    "model.momentum": {"low": 0.0, "high": 0.9},
}


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(
        f"study: {json.dumps({'space': SPACE, 'grid': {'pruning.method': ['snip', 'random']}})}\n"
    )
    return "mine.yaml"


def expanded(argv: list[str]) -> list[str]:
    """Return a command line as the parser gets it, with the verb."""
    command = CommandLine(argv)
    return [command.verb, *command.words]


def dotted(argv: list[str]) -> dict:
    """What stands for the keys with dots: by section."""
    changed = ("--study.space=", "--study.grid=")
    return {
        option.partition("=")[0]: yaml.load(option.partition("=")[2], ConfigLoader)
        for option in argv
        if option.startswith(changed)
    }


@pytest.mark.parametrize("verb", ["study", "fit", "analyze", "advise"])
def test_a_file_needs_no_option(config, verb):
    name = [] if verb == "fit" else ["--study.name=mine"]
    trials = ["--study.trials=2"]
    assert expanded([verb, config, *trials]) == [verb, "--config", config, *trials, *name]
    assert expanded([verb, config, config])[1:] == ["--config", config] * 2 + name
    plain = [verb, "--config", config, "--study.name=x", "-c", config]
    assert expanded(plain) == plain


def test_verbs_that_take_no_configuration_are_left_alone():
    assert expanded(["figures", "quickstart"]) == ["figures", "quickstart"]


@pytest.mark.parametrize(
    ("file", "command"),
    [
        ("nothing.yaml", None),
        ("quickstart", "`lit-dps configs quickstart`"),
        ("configs/studies/widht.yaml", "`lit-dps configs studies/width`"),
    ],
)
def test_a_file_that_is_not_there_is_refused_with_where_to_get_it(config, file, command, capsys):
    with refuses("--config", file, error=UserError):
        check_is_file(file, "study")
    assert main(["study", file]) == 2
    error = error_line(capsys.readouterr().err)
    assert repr(file) in error
    assert re.findall(r"`lit-dps configs .*?`", error) == ([command] if command else [])


def test_one_part_of_one_box_is_changed(config):
    given = expanded(
        ["study", config, "--study.space.model.momentum.low", "0.5", "--study.trials=3"]
    )
    assert given[:3] == ["study", "--config", config] and given[3] == "--study.trials=3"
    assert dotted(given[4:]) == {
        "--study.space": SPACE | {"model.momentum": {"low": 0.5, "high": 0.9}}
    }
    given = expanded(
        ["study", f"--config={config}", "--study.space.model.learning_rate.high=1e-1"]
        + ["--study.space.model.width={choices: [16, 32]}", "--study.grid.optim.delay", "[0, 4]"]
    )
    boxes = SPACE | {"model.learning_rate": {"low": 1e-3, "high": 0.1, "scale": "log"}}
    assert dotted(given) == {
        "--study.space": boxes | {"model.width": {"choices": [16, 32]}},
        "--study.grid": {"pruning.method": ["snip", "random"], "optim.delay": [0, 4]},
    }


def test_a_dotted_section_of_a_file_keeps_its_other_axes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("study.grid: {pruning.method: [snip, random]}\n")
    given = expanded(["study", "mine.yaml", "--study.grid.optim.delay", "[0, 4]"])
    axes = {"pruning.method": ["snip", "random"], "optim.delay": [0, 4]}
    assert dotted(given) == {"--study.grid": axes}


def test_the_last_whole_space_is_the_one_that_is_changed(config):
    whole = ["--study.space", "{model.lr: {low: 1e-3, high: 1}}"]
    given = expanded(["study", config, *whole, "--study.space.model.lr.high", "2"])
    assert dotted(given[-2:])["--study.space"] == {"model.lr": {"low": 1e-3, "high": 2}}
    assert given[3] == f"--study.space={whole[1]}"


def test_a_dotted_option_keeps_the_types_of_values(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(
        "study:\n  space:\n"
        "    model.lr: {choices: [1e-3, 1.5e2, '1e-3', 2024-01-02T00:00:00Z, 😀, .inf]}\n"
        "    model.momentum: {low: 1e-1, high: 1}\n"
    )
    text = "{choices: [1e-3, 1e-2]}"
    given = ["study", "mine.yaml", "--study.space.model.wd", text]
    space = dotted(expanded(given))["--study.space"]
    values = [1e-3, 150.0, "1e-3", "2024-01-02T00:00:00Z", "😀", math.inf]
    assert space["model.lr"] == {"choices": values}
    assert space["model.wd"] == {"choices": [1e-3, 1e-2]}
    given = ["study", "mine.yaml", "--study.space.model.momentum.high", "9e-1"]
    alone = parsed_study(CommandLine(given[:2])).space
    changed = parsed_study(CommandLine(given)).space
    assert changed["model.lr"] == alone["model.lr"]
    assert alone["model.momentum"] == {"low": 0.1, "high": 1}
    assert changed["model.momentum"] == {"low": 0.1, "high": 0.9}


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--study.space.model.momentun.low", "study.space.model.momentun.low is 0.5"),
        ("--study.space.model.momentun.low", " model.momentum.low?"),
        ("--study.space.model.momentum.lwo", "of model.learning_rate, model.momentum"),
        ("--study.space.model.momentum", "study.space.model.momentum is 0.5"),
    ],
)
def test_what_is_no_part_of_a_box_is_refused(config, option, said):
    with pytest.raises(UserError) as refused:
        expanded(["study", config, option, "0.5"])
    assert said in str(refused.value)


def test_a_section_that_is_no_mapping_gets_no_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "odd.yaml").write_text("study: [1]\n")
    assert expanded(["study", "odd.yaml"]) == ["study", "--config", "odd.yaml"]
    with refuses("--config", "", error=UserError):
        expanded(["study", "odd.yaml", "--config"])


def name_of(*words: str) -> str | None:
    """Return the name that a study gets on a command line; None if it gets none."""
    option, _, name = expanded(["study", *words])[-1].partition("=")
    return name if option == "--study.name" else None


def test_a_study_is_named_after_its_last_file(config, tmp_path):
    contents = {
        "a.b": "",
        "12": "",
        "named": "study: {name: x}",
        "section": "name: x",
        "nested": "study: section.yaml",
    }
    for name, content in contents.items():
        (tmp_path / f"{name}.yaml").write_text(content)
    assert (
        name_of(config)
        == name_of("-c", config)
        == name_of(f"--config={tmp_path / config}")
        == "mine"
    )
    assert (name_of(config, "a.b.yaml"), name_of("12.yaml")) == ("a.b", "12")
    for others in (
        ["named.yaml"],
        ["nested.yaml"],
        ["--study", "section.yaml"],
        ["--study={name: x}"],
    ):
        assert name_of(config, *others) is None
    assert name_of("named.yaml", config) is None
    assert expanded(["study", config, "--study.name", "x"])[-1] == "--study.name=x"
    assert expanded(["analyze", "--storage.folder", "there"])[-1] == "--storage.folder=there"


def test_migrate_says_how_a_study_without_a_name_is_resumed():
    lines = report(Migration({"study": 3, "other": 4}, [], None), None)
    (line,) = [line for line in lines if "study.name: " in line]
    assert "study.name: study " in line


def test_the_name_of_a_file_is_refused_as_any_other(config, tmp_path, capsys, monkeypatch):
    base = yaml.safe_load(FAST.read_text())
    del base["study"]["name"]
    (tmp_path / "a(1).yaml").write_text(yaml.safe_dump(base))
    monkeypatch.setattr("sys.argv", ["lit-dps"])
    assert main(["study", "a(1).yaml", "--forecast"]) == 2
    refused = capsys.readouterr().err
    assert refusals_in(refused) == [("study.name", "'a(1)'")] and refused.count("\n") == 1


@pytest.mark.parametrize("stem", ["12", "null", "my config"])
def test_the_name_of_a_file_is_a_text(stem, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mlruns").mkdir()
    (tmp_path / f"{stem}.yaml").write_text("study: {trials: 1}\n")
    law_study(f"sqlite:///{tmp_path}/mlruns/study.db", stem, trials=1)
    assert main(["analyze", f"{stem}.yaml"]) == 0
    assert f"study {stem}, " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("stduy", "lit-dps study?"),
        ("mine.yaml", "lit-dps study mine.yaml?"),
        ("xyzzy", "'xyzzy'; there are fit, "),
    ],
)
def test_a_verb_that_is_none(word, said, capsys):
    assert main([word]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "near"),
    [
        (
            "model: ... module 'lit_dps.module' has no attribute: lit_dps.module.ImageClasifier",
            "lit_dps.module.ImageC",
        ),
        ("data: Expected a dot import path string: Digist", "lit_dps.data.Digits"),
        ("unrecognized arguments: --goal.eror 1", "--goal.error"),
        ("Subcommand 'fit' does not accept option 'goal.eror'", "goal.error"),
        ("Option 'gaol.error' is not accepted", "goal.error"),
        ("Option 'goal.xyzzy' is not accepted", None),
        ("trainer: lit_dps.module.ImageClassifier is no accelerator", None),
    ],
)
def test_what_was_likely_meant(text, near):
    import lit_dps.data  # as the parser has that asks
    import lit_dps.module  # noqa: F401

    parser, below = ArgumentParser(), ArgumentParser()
    below.add_argument("--goal.error")
    parser.add_argument("verb", choices={"fit": below})
    said = likely_meant(text, parser)
    assert near in said if near else said == ""


def test_each_key_has_its_value_and_source(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "goal.yaml").write_text("# the goal\nerror: 0.1\n")
    (tmp_path / "mine.yaml").write_text(
        "model:\n  class_path: a.B\n  init_args:\n    learning_rate: 0.1\n"
        "study:\n  trials: 3\n  space:\n    model.lr: {low: 1, high: 2}\ngoal: goal.yaml\n"
    )
    command = CommandLine(
        ["study", "mine.yaml", "--study.seed", "1e2", "--study.sampler=12", "--engine", "fused"]
    )
    values = {
        "study.trials": 3,
        "study.seed": 100,
        "study.sampler": "12",
        "study.engine": "fused",
        "goal.error": 0.1,
        "goal.max_steps": None,
    }
    assert {key: command.value(key) for key in values} == values
    sources = {
        "study.trials": "mine.yaml, line 6",
        "study.space.model.lr.high": "mine.yaml, line 8",
        "model.learning_rate": "mine.yaml, line 4",
        "goal.error": "goal.yaml, line 2",
        "study.seed": "--study.seed",
        "study.engine": "--engine",
    }
    assert {key: str(command.source(key)) for key in sources} == sources
    assert command.source("optim.delay") is None
    assert (command.study_name, command.storage.folder) == ("mine", "mlruns")
    assert pickle.loads(pickle.dumps(command)) == command


@pytest.mark.parametrize("text", ["2024_11_30", "010", "1e3", "yes", "[a]"])
def test_the_text_of_an_option_is_not_read_as_a_number(text):
    words = ["--checkpoint", text, f"--goal.metric={text}", "--storage.mlflow", text]
    command = CommandLine(["fit", *words, "--storage.folder", text])
    for key in ("checkpoint", "goal.metric", "storage.mlflow", "storage.folder"):
        assert command.value(key) == text, key
    assert _checkpoint_option(command) == Path(text)
    command = CommandLine(["fit", "--goal.metric", "null", "--goal.at_most", "1e-3"])
    assert (command.value("goal.metric"), command.value("goal.at_most")) == (None, 1e-3)


def test_a_file_is_read_once(config, monkeypatch):
    reads = []
    read_text = Path.read_text

    def counted(path, *args, **kwargs):
        reads.append(path.name)
        return read_text(path, *args, **kwargs)

    monkeypatch.setattr(Path, "read_text", counted)
    command = CommandLine(["study", config])
    command.value("study.trials"), command.section("study"), command.source("study.space")
    assert reads == [config]


def parsed_study(command: CommandLine) -> Namespace:
    """Return the section `study` of a command as jsonargparse parses it."""
    parser = CommandParser()
    parser.command = command
    parser.add_argument("--config", action=ActionConfigFile)
    parser.add_class_arguments(StudyConfig, "study")
    return parser.parse_args(command.words).study


FORMER = "study.slack is now study.race_factor; the old name will be removed in the next release."


@pytest.mark.parametrize(
    "words",
    [
        ["former.yaml"],
        ["--config=former.yaml"],
        ["nested.yaml"],
        ["--study", "section.yaml"],
        ["--study={slack: 3}"],
        ["--config", "study: {slack: 3}"],
        ["--study.slack", "3"],
        ["former.yaml", "--study.slack=3"],
    ],
)
def test_a_former_name_of_a_key_works_with_one_warning(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "former.yaml").write_text("study: {slack: 3}\n")
    (tmp_path / "section.yaml").write_text("slack: 3\n")
    (tmp_path / "nested.yaml").write_text("study: section.yaml\n")
    command = CommandLine(["study", *words])
    warn_of_former_name.cache_clear()
    command.warn_of_former_keys()
    assert capsys.readouterr().err == f"lit-dps: warning: {FORMER}\n"
    assert command.value("study.race_factor") == 3
    assert command.value("study.slack") is None
    assert parsed_study(command).race_factor == 3


@pytest.mark.parametrize(
    ("words", "places"),
    [
        (["both.yaml"], ("both.yaml, line 2", "both.yaml, line 3")),
        (["--study={slack: 2, race_factor: 2}"], ("--study, line 1",)),
    ],
)
def test_a_key_under_both_names_in_one_place_is_refused(words, places, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "both.yaml").write_text("study:\n  slack: 3\n  race_factor: 3\n")
    with refuses("study.slack", error=UserError) as refused:
        CommandLine(["study", *words])
    for place in places:
        assert place in str(refused.value)


@pytest.mark.parametrize(
    "words",
    [
        ["former.yaml", "--study.race_factor", "2"],
        ["former.yaml", "present.yaml"],
        ["--study.slack", "3", "--study.race_factor", "2"],
        ["--study.race_factor", "3", "--study.slack", "2"],
        ["present.yaml", "former.yaml", "--study={race_factor: 2}"],
    ],
)
def test_the_later_of_a_former_and_a_present_name_wins(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "former.yaml").write_text("study: {slack: 3}\n")
    (tmp_path / "present.yaml").write_text("study: {race_factor: 2}\n")
    command = CommandLine(["study", *words])
    assert command.value("study.race_factor") == 2
    assert command.former_keys == ["study.slack"]
    assert parsed_study(command).race_factor == 2
