"""Refused values and keys: the error names the key and the value, and the command where it was set."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonargparse import ArgumentParser
from lightning import LightningModule

from lit_dps.cli import analyze, figures
from lit_dps.cli.command_line import CommandLine
from lit_dps.cli.config_file import Source
from lit_dps.cli.key_checks import check_command
from lit_dps.cli.options import MasksOptions, StudyOptions, add_options
from lit_dps.cli.parser import likely_meant, new_parser
from lit_dps.cli.study import StudyCLI
from lit_dps.core.errors import ConfigError, UserError
from lit_dps.core.registry import OWN_MODULE
from lit_dps.study.preflight.keys import check_goals
from lit_dps.training.pruning_callback import PruningCallback
from tests.e2e.commands import FAST
from tests.support.errors import refuses
from tests.support.fake_study import law_study

BASE = yaml.safe_load(FAST.read_text())
MISSING = object()


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def write(changes: dict[str, Any], name: str = "mine.yaml") -> list[str]:
    """Write a configuration with other values of some keys a/b/c; return its lines."""
    config = copy.deepcopy(BASE)
    for path, value in changes.items():
        *parents, last = path.split("/")
        node = config
        for parent in parents:
            node = node.setdefault(parent, {})
        if value is MISSING:
            del node[last]
        else:
            node[last] = value
    Path(name).write_text(yaml.safe_dump(config, sort_keys=False))
    return Path(name).read_text().splitlines()


def refused(*words: str) -> tuple[UserError, Source | None]:
    """Return the error of a command, and where the command sets the key of the error."""
    command = CommandLine(words)
    with pytest.raises(UserError) as info:
        check_command(command)
        setup = StudyCLI(command, StudyOptions).setup()
        setup.study.check()
        PruningCallback.of(setup.pruning)
    assert info.value.key is not None
    return info.value, command.source(info.value.key)


@pytest.mark.parametrize(
    ("path", "value", "allowed", "hint"),
    [
        ("study/trials", float("nan"), "a whole number", None),
        ("study/trials", 6.0, "a whole number", "Write 6."),
        ("study/trials", 6.5, "a whole number", None),
        ("study/workers", 2.5, "a whole number or null", None),
        ("study/scramble", 3, "true or false", None),
        ("study/engine", "turbo", "one of auto, single, stacked, lightning, fused", None),
        ("study/name", 123, "a text", "Write it in quotes."),
        ("study/name", True, "a text", "Write it in quotes."),
        ("storage/folder", 12, "a text", "Write it in quotes."),
        ("pruning/biases", "none", "one of paper, keep", None),
        ("goal/max_steps", 80.5, "a whole number", None),
        ("smoothness/interval", 2.5, "a whole number or null", None),
        ("trainer/log_every_n_steps", 2.5, "a whole number or null", None),
        ("model/init_args/learning_rate", "high", "a number", None),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_with_its_line(path, value, allowed, hint):
    lines = write({path: value})
    error, source = refused("study", "mine.yaml")
    *parents, name = path.replace("/init_args", "").split("/")
    assert error.key == ".".join([*parents, name])
    assert [error.value] == [value] or str(error.value) == str(value) == "nan"
    assert (error.allowed, error.hint) == (allowed, hint)
    (number,) = [i for i, line in enumerate(lines, 1) if line.strip().startswith(f"{name}:")]
    assert source == Source("mine.yaml", number)


def test_an_item_of_a_list_is_the_value():
    write({"study/batch_sizes": [16, 2.5]})
    error, source = refused("study", "mine.yaml")
    assert (error.key, error.value) == ("study.batch_sizes", 2.5)
    assert source is not None and source.name == "mine.yaml"


@pytest.mark.parametrize(
    ("path", "key", "hint"),
    [
        ("model/init_args/lerning_rate", "model.lerning_rate", "did you mean model.learning_rate?"),
        (
            "model/init_args/network/init_args/hiden",
            "model.network.hiden",
            "did you mean model.network.hidden?",
        ),
        ("data/init_args/btch_size", "data.btch_size", "did you mean data.batch_size?"),
        ("pruning/options/batchs", "pruning.options.batchs", "Did you mean batches?"),
    ],
)
def test_an_unknown_argument_is_refused_with_the_nearest_name_and_its_line(path, key, hint):
    lines = write({path: 3})
    error, source = refused("study", "mine.yaml")
    assert (error.key, error.hint) == (key, hint)
    name = key.rpartition(".")[2]
    (number,) = [i for i, line in enumerate(lines, 1) if line.strip() == f"{name}: 3"]
    assert source == Source("mine.yaml", number)


class HiddenArguments(LightningModule):
    """jsonargparse reads the arguments of `__new__`, which names none."""

    def __new__(cls, *args, **kwargs):
        return super().__new__(cls)

    def __init__(self, LR: float = 0.1):
        super().__init__()


class Named(LightningModule):
    def __init__(self, LR: float = 0.1):
        super().__init__()


class LostArguments(Named):
    """Its `kwargs` go nowhere."""

    def __init__(self, **kwargs):
        super().__init__()


@pytest.mark.parametrize(
    ("kind", "name", "words"),
    [
        ("HiddenArguments", "LR", "__new__"),
        ("HiddenArguments", "LRR", "did you mean model.LR?"),
        ("LostArguments", "LR", "name LR"),
    ],
)
def test_a_refused_argument_is_not_its_own_suggestion(kind, name, words):
    write({"model": {"class_path": f"{__name__}.{kind}", "init_args": {name: 1.0}}})
    error, _ = refused("study", "mine.yaml")
    assert (error.key, error.allowed) == (f"model.{name}", "LR")
    assert (
        error.hint is not None and words in error.hint and f"mean model.{name}?" not in error.hint
    )


@pytest.mark.parametrize("section", ["model", "data"])
def test_a_module_that_is_not_found_is_refused_with_where_it_must_be(section):
    write({f"{section}/class_path": "my_own_code.Net"})
    error, _ = refused("study", "mine.yaml")
    assert (error.key, error.hint) == (section, OWN_MODULE)


def test_an_argument_without_a_similar_name_is_refused_with_all_names():
    write({"data/init_args": {"nothing": 1}})
    error, _ = refused("study", "mine.yaml")
    assert error.key == "data.nothing" and error.allowed is not None
    assert {"batch_size", "order"} <= {*error.allowed.split(", ")}


def test_a_name_of_a_known_section_is_compared_with_the_names_of_this_section():
    command = CommandLine(["study", "--goal.foo", "1"])
    with refuses("goal.foo", 1, error=UserError) as caught:
        check_command(command)
    assert caught.value.hint is None
    parser = ArgumentParser()
    parser.add_argument("--goal.monitor")
    assert likely_meant("Subcommand 'fit' does not accept option 'goal.foo'", parser) == ""


@pytest.mark.parametrize(
    ("option", "key"),
    [
        (("--study.space.model.momentum.low", "zz"), "study.space.model.momentum.low"),
        (("--study.space.model.momentum.low", "3"), "study.space.model.momentum"),
        (("--study.space.model.momentum", "{low: 3, high: 1}"), "study.space.model.momentum"),
        (("--study.space={model.momentum: {low: 3, high: 1}}",), "study.space.model.momentum"),
        (("--study.trials", "1.5"), "study.trials"),
        (("--engine", "turbo"), "study.engine"),
        (("--model.init_args.learning_rate", "zz"), "model.learning_rate"),
    ],
)
def test_an_option_is_the_source_of_its_value_and_not_the_file(option, key):
    write({"model/init_args/learning_rate": 0.1})
    error, source = refused("study", "mine.yaml", *option)
    assert error.key == key
    assert source is not None and source.is_option


def test_the_other_parts_of_a_box_keep_their_line():
    lines = write({"study/space/model.momentum/high": "zz"})
    error, source = refused("study", "mine.yaml", "--study.space.model.momentum.low=0.1")
    assert error.key == "study.space.model.momentum.high"
    assert source == Source("mine.yaml", lines.index("      high: zz") + 1)


def test_a_searched_value_has_the_line_of_its_range():
    lines = write({"model/init_args/momentum": 0.9})
    command = CommandLine(["study", "mine.yaml"])
    for value, line in ((0.9, "    momentum: 0.9"), (1.5, "    model.momentum:")):
        message = command.with_source(ConfigError("model.momentum", value, "below 1"))
        assert message.endswith(f"(mine.yaml, line {lines.index(line) + 1})")


@pytest.mark.parametrize("verb", ["study", "fit"])
@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"model": MISSING}, "model.class_path"),
        ({"data": MISSING}, "data.class_path"),
        ({"data": None}, "data.class_path"),
        ({"data": {}}, "data.class_path"),
        ({"model/class_path": MISSING}, "model.class_path"),
        ({"model": MISSING, "data": MISSING}, "model.class_path"),
    ],
)
def test_a_missing_class_is_refused_with_the_file_and_what_to_write(verb, changes, key):
    write(changes)
    command = CommandLine([verb, "mine.yaml"])
    with refuses(key, None, error=UserError) as caught:
        check_command(command)
    assert caught.value.allowed is not None and "class_path:" in caught.value.allowed
    assert "mine.yaml" in command.with_source(caught.value)


def test_without_a_file_the_files_of_the_package_are_named():
    with refuses("--config", None, error=UserError) as caught:
        check_command(CommandLine(["study"]))
    assert "lit-dps configs" in str(caught.value)


@pytest.mark.parametrize(
    "words", [["--print_config"], ["--model.help=lit_dps.ImageClassifier"], ["--of", "x"]]
)
def test_commands_that_train_no_configuration_need_no_class(words):
    check_command(CommandLine(["fit", *words]))


@pytest.mark.parametrize(
    ("section", "value"),
    [("data", "lit_dps.data.Digits"), ("data", "data.yaml"), ("data/class_path", "a.B")],
)
def test_a_class_may_be_set_in_each_way(section, value):
    write({"data": MISSING, section: value})
    check_command(CommandLine(["study", "mine.yaml"]))


@pytest.mark.parametrize("verb", ["study", "fit", "analyze"])
@pytest.mark.parametrize("key", ["print_config", "config", "help"])
def test_an_option_in_a_file_is_refused_with_the_option(verb, key):
    write({key: True})
    with refuses(key, True, error=UserError) as caught:
        check_command(CommandLine([verb, "mine.yaml"]))
    assert caught.value.hint == f"--{key}"


@pytest.mark.parametrize(("key", "option"), [("validate_every", "--validate-every"), ("show",) * 2])
def test_an_option_of_the_verb_in_a_file_is_refused(key, option):
    write({key: 3})
    with refuses(key, 3, error=UserError) as caught:
        check_command(CommandLine(["study", "mine.yaml"]))
    assert caught.value.hint == f"--{option.removeprefix('--')}"


def test_two_files_after_config_are_refused_with_how_to_write_them():
    write({})
    write({}, "second.yaml")
    with pytest.raises(UserError) as caught:
        StudyCLI(CommandLine(["study", "--config", "mine.yaml", "second.yaml"]), StudyOptions)
    assert caught.value.value == "second.yaml" or "second.yaml" in str(caught.value)


@pytest.mark.parametrize("text", ["", "# study: {trials: 1}\n", "null\n", "---\n"])
def test_an_empty_file_sets_no_key(text):
    write({"pruning": "empty.yaml"})
    Path("empty.yaml").write_text(text)
    command = CommandLine(["study", "mine.yaml", "empty.yaml", "--study.name=x"])
    setup = StudyCLI(command, StudyOptions).setup()
    assert (setup.study.trials, setup.pruning.method) == (4, "snip")


@pytest.mark.parametrize("words", [["{}"], ["--config", "{}"], ["--config={}"]])
@pytest.mark.parametrize(
    ("name", "fact"),
    [("folder", "is a folder"), ("link.yaml", "'gone.yaml', which does not exist")],
)
def test_what_is_no_file_is_named(words, name, fact):
    Path("folder").mkdir()
    Path("link.yaml").symlink_to("gone.yaml")
    with refuses("--config", name, error=UserError) as caught:
        CommandLine(["study", *[word.format(name) for word in words]])
    assert fact in str(caught.value)


@pytest.mark.parametrize(
    "content", [b"\xff\xfe", BASE["study"]["name"].encode("utf-16"), b"study:\n\ttrials: 4\n"]
)
def test_bytes_and_tabs_are_refused_with_the_file(content):
    Path("mine.yaml").write_bytes(content)
    with refuses("mine.yaml", error=UserError):
        CommandLine(["study", "mine.yaml"])


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        (["masks", "--at", "2"], "--at", 2),
        (["masks", "--at=high"], "--at", "high"),
        (["masks", "--points", "1.5"], "--points", 1.5),
        (["study", "--validate-every", "often"], "--validate-every", "often"),
    ],
)
def test_an_option_of_a_verb_is_named_with_dashes(words, key, value):
    command = CommandLine(words)
    parser = new_parser(command, None)
    add_options(parser, MasksOptions if words[0] == "masks" else StudyOptions)
    with refuses(key, value):
        parser.read_command()


@pytest.mark.parametrize("goal", ["0.05", "1.5", "low"])
def test_the_goal_of_figures_is_named_as_the_option(goal):
    Path("mlruns").mkdir()
    law_study("sqlite:///mlruns/study.db", "law", trials=1)
    value = goal if goal == "low" else float(goal)
    with refuses("--goal", value):
        figures.main(CommandLine(["figures", "law", "--goal", goal]))


def test_analyze_names_the_line_too():
    write({"study/name": 12})
    command = CommandLine(["analyze", "mine.yaml"])
    with refuses("study.name", 12) as caught:
        analyze.main(command)
    assert "mine.yaml, line " in command.with_source(caught.value)


@pytest.mark.parametrize("seed", [-1, 10**20])
def test_a_seed_out_of_range_is_refused(seed):
    write({"seed_everything": seed})
    error, source = refused("study", "mine.yaml")
    assert (error.key, error.value) == ("seed_everything", seed)
    assert source is not None and source.name == "mine.yaml"


def test_a_step_budget_that_never_ends_is_refused():
    write({"goal/max_steps": 4 * 10**12})
    setup = StudyCLI(CommandLine(["study", "mine.yaml"]), StudyOptions).setup()
    with refuses("goal.max_steps", 4 * 10**12):
        check_goals(setup)


@pytest.mark.parametrize(
    ("words", "key", "value", "hint"),
    [
        (["--goal.error", "0.3"], "goal.error", 0.3, "--goal"),
        (["--goal.eror=0.3"], "goal.eror", 0.3, "--goal"),
        (["--study.goals", "[0.3]"], "study.goals", [0.3], "--study.goals"),
        (["--study.statistic", "median"], "study.statistic", "median", "--statistic"),
        (["--study.train_past_goal", "true"], "study.train_past_goal", True, None),
        (["--study={trials: 9}"], "study.trials", 9, None),
        (["--model.width", "3"], "model.width", 3, None),
        (["--seed_everything", "3"], "seed_everything", 3, None),
    ],
)
def test_analyze_refuses_options_that_the_storage_answers(words, key, value, hint):
    write({})
    with refuses(key, value) as refused:
        check_command(CommandLine(["analyze", "mine.yaml", *words]))
    assert (hint in refused.value.hint) if hint else refused.value.hint is None


def test_analyze_ignores_keys_of_files_and_takes_its_options():
    write({"goal/eror": 0.3})
    options = ["--study.name", "x", "--storage.folder", "there", "--statistic", "median"]
    check_command(CommandLine(["analyze", "mine.yaml", "-c", "goal: {error: 0.3}", *options]))
