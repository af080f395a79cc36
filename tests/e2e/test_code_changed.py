"""A module that is edited after a study ran: `study` and `advise` refuse it, and `fit --of` names it."""

from __future__ import annotations

import pytest
import yaml

from lit_dps.store import AdviceStore, attributes, open_storage

MODULE = """
from lit_dps.module import ImageClassifier

class Mine(ImageClassifier):
    def loss(self, batch):
        return super().loss(batch) * 1.0
"""
NETWORK = {"class_path": "lit_dps.models.MLP", "init_args": {"hidden": [8]}}
RATES = {"model.learning_rate": {"low": 0.03, "high": 0.3, "scale": "log"}}


@pytest.mark.parametrize("verb", ["advise", "fit", "study"])
def test_code_that_changed_is_named(call, tmp_path, monkeypatch, verb):
    name = f"edited_for_{verb}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    config = {
        "model": {"class_path": f"{name}.Mine", "init_args": {"network": NETWORK}},
        "data": {"class_path": "lit_dps.data.Digits", "init_args": {"batch_size": 32}},
        "trainer": {"accelerator": "cpu"},
        "goal": {"error": 0.5, "check_interval": 4, "max_steps": 40},
        "study": {"name": name, "batch_sizes": [32], "sparsities": [0.0], "trials": 2, "workers": 1, "space": RATES},
    }
    config["study"]["noise_scale"] = False
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(config))
    assert call("study", "c.yaml").code == 0
    (tmp_path / f"{name}.py").write_text(MODULE.replace("1.0", "1.5"))
    if verb == "fit":
        done = call("fit", "--of", name, "--cell", "B=32")
        assert done.code == 0
        assert f"note: {name}.py is not as the study's trial was trained with" in done.err
        return
    url = f"sqlite:///{tmp_path}/mlruns/study.db"
    AdviceStore(url, name).keep(environment=attributes(open_storage(url), name)["environments"][0])
    done = call(verb, "c.yaml", *(("--budget", "60s") if verb == "advise" else ()))
    assert done.code == 2 and f"{name}.py is not as in its stored " in done.err
