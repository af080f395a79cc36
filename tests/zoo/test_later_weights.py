"""Weights that join the training after pruning are in no mask, and the table and `fit` say so."""

from __future__ import annotations

import yaml

from lit_dps.core.trial import IN_NO_MASK, JOINED_AT, TRAINED_THEN
from tests.e2e.commands import run_here
from tests.zoo.verify import assert_works

FINETUNING = {
    "class_path": "lightning.pytorch.callbacks.BackboneFinetuning",
    "init_args": {"unfreeze_backbone_at_epoch": 1, "verbose": False},
}
BODY = 8 * 16 + 16 + 16 * 16 + 16
HEAD = 16 * 4 + 4


def test_a_backbone_that_is_unfrozen_later_is_noted_by_study_and_fit(zoo):
    trainer = {"callbacks": [FINETUNING]}
    goal = {"monitor": "val_loss", "error": 1e-6, "max_steps": 30}
    outcome = zoo("later.Backbone", trainer=trainer, goal=goal, batch_sizes=[16])
    assert_works(outcome)
    dense, sparse = outcome.results
    assert IN_NO_MASK not in dense.flags
    counts = [sparse.flags[key] for key in (IN_NO_MASK, TRAINED_THEN, JOINED_AT)]
    assert counts == [BODY, BODY + HEAD, 11]  # an epoch has ten steps
    said = f"{BODY} of {BODY + HEAD} weights trained at step 11 "
    assert [
        said in line for line in outcome.out.splitlines() if line.startswith("note: B=16 S=0.8")
    ] == [True]
    assert "BackboneFinetuning are in no mask" in outcome.err

    config = yaml.safe_load((outcome.folder / "zoo.yaml").read_text())
    config["data"]["init_args"]["batch_size"] = 16
    config["trainer"]["logger"] = False
    (outcome.folder / "fit.yaml").write_text(yaml.safe_dump(config))
    fitted = run_here(outcome.folder, "fit", "--config", "fit.yaml", "--pruning.sparsity", "0.8")
    assert fitted.returncode == 0, fitted.stderr
    assert f"note: {said}" in fitted.stdout
