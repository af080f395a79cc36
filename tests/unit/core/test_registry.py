"""Names in a configuration: what a class path may be, and what its error says."""

from __future__ import annotations

import sys

import pytest

from lit_dps.core.errors import ConfigError
from lit_dps.models import MLP
from lit_dps.module import ImageClassifier
from lit_dps.optim import RULES, Rule, rule_named
from lit_dps.report.figures import of_others


def update_(weights, gradients, state, learning_rate, hyperparameters, step):
    weights.sub_(learning_rate * gradients)


OF_A_RANK = Rule("of_a_rank", ("rank",), (), update_)


def refusal(name: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        rule_named(name)
    assert (caught.value.key, caught.value.value) == ("model.optimizer", name)
    return caught.value


def test_another_object_is_named_by_its_type():
    assert "type function" in refusal(f"{__name__}.update_").allowed


def test_a_used_class_path_is_no_name_of_the_package():
    path = f"{__name__}.OF_A_RANK"
    try:
        assert rule_named(path) is OF_A_RANK
        assert path not in refusal("no_such_rule").allowed
    finally:
        RULES.pop(path, None)


def test_a_missing_module_has_a_remedy():
    assert "PYTHONPATH" in (refusal("no_such_module.Rule").hint or "")


def test_a_hyperparameter_that_the_module_lacks_is_named():
    path = f"{__name__}.OF_A_RANK"
    try:
        module = ImageClassifier(MLP(hidden=[4]), optimizer=path)
        with pytest.raises(ConfigError) as caught:
            module.configure_optimizers()
        assert (caught.value.key, caught.value.value) == ("model.optimizer", path)
        assert "rank" in caught.value.allowed
    finally:
        RULES.pop(path, None)


def test_a_class_as_a_figure_is_refused_with_its_module(tmp_path, monkeypatch):
    (tmp_path / "planted_figure.py").write_text("class Cosine: pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        with pytest.raises(ConfigError) as caught:
            of_others("planted_figure.Cosine", "study.figures")
        assert caught.value.key == "study.figures"
        assert "planted_figure." in (caught.value.hint or "")
    finally:
        sys.modules.pop("planted_figure", None)
