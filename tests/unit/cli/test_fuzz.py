"""Random configurations and command lines: served, or refused in one line with exit code 2, and
nothing is created."""

from __future__ import annotations

import contextlib
import copy
import io
import os
import sys
import warnings
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import lit_dps.cli.study as study_command
from lit_dps.cli import main
from lit_dps.study.preflight.check import check_study
from tests.e2e.commands import FAST

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
BASE = yaml.safe_load(FAST.read_text())
EXAMPLES = settings(
    max_examples=int(os.environ.get("LIT_DPS_FUZZ", "25")),
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
HUGE = 10**18  # nothing of that size is ever allocated: the attempt fails at once
WORDS = [
    "",
    " ",
    "null",
    "nan",
    "inf",
    "-1",
    "0",
    "1e400",
    "true",
    "a.b",
    "os.system",
    "../x",
    "\x00",
    "Ä|",
    "[1",
    "{",
]
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([-HUGE, -1, 0, 1, 2, 3, HUGE]),
    st.sampled_from([float("nan"), float("inf"), -0.5, 1e-300, 0.5, 1.0, 1.5]),
    st.sampled_from(
        [*WORDS, "lit_dps.models.MLP", "lit_dps.data.Digits", "!!python/name:os.system"]
    ),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(
                ["class_path", "init_args", "low", "high", "scale", "choices", "x", "1"]
            ),
            inner,
            max_size=3,
        ),
    ),
    max_leaves=4,
)


def paths(node: dict, prefix: tuple = ()) -> list[tuple]:
    """All keys of a nested configuration, and beside each one that is not there."""
    found = [(*prefix, "unknown")]
    for key, value in node.items():
        found.append((*prefix, key))
        if isinstance(value, dict):
            found += paths(value, (*prefix, key))
    return found


STUDY = [
    "goals",
    "slots",
    "threads",
    "seed",
    "scramble",
    "lean",
    "batch_size_key",
    "workload",
    "engine",
    "race_factor",
    "train_past_goal",
    "metrics",
]
KNOWN = [("study", key) for key in STUDY] + [
    ("pruning", key) for key in ("method", "biases", "batch_size")
]
PATHS = paths(BASE) + [
    path for path in (*KNOWN, ("smoothness", "interval")) if path not in paths(BASE)
]
OPTIONS = [
    "--config",
    "--storage.folder",
    "--storage.optuna",
    "--engine",
    *(f"--{'.'.join(path)}" for path in PATHS),
]


@pytest.fixture
def outcome(tmp_path, monkeypatch):
    """Runs a command in a folder with a configuration, but trains nothing; returns how it ended."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LIT_DPS_DATA", raising=False)
    monkeypatch.setattr(sys, "argv", ["lit-dps"])
    monkeypatch.setattr(
        study_command, "run_study", lambda setup, show, **options: 0 if check_study(setup) else 1
    )

    def run(verb: str, *args: str, config: str | bytes) -> int:
        written = config if isinstance(config, bytes) else config.encode("utf-8", "surrogatepass")
        Path("config.yaml").write_bytes(written)
        out, err = io.StringIO(), io.StringIO()
        with (
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            code = main([verb, "--config", "config.yaml", *args])
        said = err.getvalue()
        assert {path.name for path in Path().iterdir()} == {"config.yaml"}, "something was created"
        assert code in (0, 2)
        if code == 2:
            assert said.startswith("lit-dps: error: ") and said.count("\n") == 1, said
            assert len(said) > len("lit-dps: error: \n")
        return code

    return run


@EXAMPLES
@given(st.lists(st.tuples(st.sampled_from(PATHS), VALUES), min_size=1, max_size=3))
def test_changed_configurations(outcome, changes):
    config = copy.deepcopy(BASE)
    for (*parents, last), value in changes:
        node = config
        for name in parents:
            node = node.setdefault(name, {})
            if not isinstance(node, dict):
                break
        else:
            node[last] = value
    outcome("study", config=yaml.safe_dump(config))


@EXAMPLES
@given(
    st.one_of(
        st.text(max_size=60),
        st.binary(max_size=60),
        st.integers(0, len(FAST.read_text())).map(lambda n: n),
    )
)
def test_texts_that_are_no_configuration(outcome, text):
    outcome("study", config=FAST.read_text()[:text] if isinstance(text, int) else text)


@EXAMPLES
@given(
    st.sampled_from(["study", "study", "analyze", "fit"]),
    st.lists(
        st.tuples(st.sampled_from(OPTIONS), st.one_of(st.sampled_from(WORDS), VALUES.map(str))),
        max_size=3,
    ),
)
def test_command_lines(outcome, verb, options):
    arguments = [part for option in options for part in option]
    if verb == "fit":
        arguments += ["--unknown", "1"]  # it must never come to train
    outcome(verb, *arguments, config=FAST.read_text())


def test_the_plain_study_is_served(outcome):
    assert outcome("study", config=FAST.read_text()) == 0
