"""A training step that reaches through its trainer: the pruning pass puts back what it changed, or
refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
from lightning.pytorch import Callback

from lit_dps.core.attempt import Attempt
from lit_dps.core.errors import ConfigError
from lit_dps.core.trial import Cell, Trial
from lit_dps.engines.lightning_loop import TrialFit
from lit_dps.study.preflight.dry_run import dry_run
from tests.unit.engines.test_engine import quiet  # noqa: F401
from tests.unit.study.test_dry_run import of, setup


class Begin(Callback):
    """Keeps what training begins with."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == 0:
            holders = (trainer.optimizers[0], trainer.logger, trainer.datamodule)
            calls = [vars(holder).get("calls") for holder in holders]
            share = getattr(trainer.datamodule, "share", None)
            self.found = trainer.optimizers[0].param_groups[0]["lr"], calls, share
            trainer.should_stop = True


def begin(model: str, sparsity: float) -> tuple:
    """What a trial of an animal begins with after its pruning pass."""
    made = setup(f"reaching.{model}")
    with made.workload.without_side_effects() as workload:
        settings = replace(made.trial_settings(), workload=workload)
        trial = Trial(Cell(16, sparsity), 0, {"model.lr": 0.01})
        fit = TrialFit.of(settings, Attempt(trial, settings.goal.build()))
        seen = Begin()
        fit.trainer(last=[seen]).fit(fit.built.module, datamodule=fit.built.data)
        return seen.found


@pytest.mark.parametrize("model", ["Rate", "Marked"])
def test_a_pruned_trial_begins_as_a_dense_one(model):
    assert begin(model, 0.5) == begin(model, 0.0) == (0.01, [None] * 3, None)


@pytest.mark.parametrize(
    ("model", "data"),
    [
        ("FadingData", "data.Clouds"),
        ("FadingArray", "data.Clouds"),
        ("Weighted", "data.WithWeights"),
        ("FilledState", "data.Clouds"),
    ],
)
def test_a_step_that_changes_the_data_or_the_optimizer_in_place_is_refused(model, data):
    with pytest.raises(ConfigError) as error:
        dry_run(setup(f"reaching.{model}", data, sparsities=[0.5]))
    assert (error.value.key, error.value.value) == ("model", model)


def test_an_array_that_the_data_set_fills_is_not_refused():
    assert dry_run(setup("models.Net", "data.Cached", sparsities=[0.5]))[1] == {}


@pytest.mark.parametrize("metric", ["F1", "AUROC"])
def test_a_metric_of_torchmetrics_at_the_end_of_an_epoch_is_not_refused(metric):
    sizes = {"data": "dry_runs.OneBatchSize", "goal": of("val_gap")}
    assert dry_run(setup("dry_runs.AtEpochEnd", arguments={"metric": metric}, **sizes))[1] == {}
    with pytest.raises(ConfigError) as error:
        dry_run(setup("dry_runs.OfEachBatch", arguments={"metric": metric}, **sizes))
    assert (error.value.key, error.value.value) == ("goal.metric", "val_gap")
