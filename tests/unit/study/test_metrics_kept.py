"""Further metrics of validation, kept in the curve at each check."""

from __future__ import annotations

import pytest
from torch import nn

from lit_dps.analysis.analysis import Analysis
from lit_dps.core.config import StorageConfig, StudyConfig
from lit_dps.core.search_space import Range
from lit_dps.core.trial import Cell, Trial
from lit_dps.module import ImageClassifier
from lit_dps.storage.read import read_study
from lit_dps.study.preflight.check import check_study, set_up_data
from lit_dps.study.setup import StudySetup
from lit_dps.training.workload import Workload
from tests.support.errors import refuses
from tests.support.fake_study import result, write_study
from tests.support.ranks import same_on_ranks
from tests.support.runs import train
from tests.support.saved_study import Study
from tests.support.setups import check, setup_of
from tests.unit.engines.test_engine import DATA, GOAL, MODEL, PARAMS, WORKLOAD, quiet  # noqa: F401
from tests.unit.training.test_checkpoint_callback import assert_goes_on

SHORT = {**GOAL, "error": 0.05, "max_steps": 24}
KEPT = {"metrics": ("val_loss",)}


class AlsoConfident(ImageClassifier):
    """Logs the mean probability of the predicted class too."""

    def __init__(
        self,
        network: nn.Module,
        optimizer: str = "sgd",
        learning_rate: float = 0.1,
        momentum: float = 0.9,
    ):
        super().__init__(network, optimizer, learning_rate, momentum)

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        confidence = self(batch[0]).softmax(1).amax(1).mean()
        self.log("confidence", confidence, on_epoch=True, batch_size=len(batch[1]))


def trials() -> list[Trial]:
    return [
        Trial(Cell(16, s), i, {**PARAMS, "model.learning_rate": r})
        for i, r in enumerate((0.02, 0.05))
        for s in (0, 0.9)
    ]


def kept(trials: list[Trial], workload: Workload = WORKLOAD, **options) -> dict:
    results = train(trials, workload, SHORT, **options)
    return {(r.trial.point, r.trial.cell): r.curve for r in results}


@pytest.mark.parametrize("data", [{}, {"eval_batch_size": 50}])
def test_both_engines_keep_the_same_and_change_nothing_else(data):
    used = Workload(MODEL, {**DATA, "init_args": data}, {"accelerator": "cpu"})
    loop, trainer = (kept(trials(), used, lean=lean, **KEPT) for lean in (True, False))
    assert loop == trainer
    plain = kept(trials(), used, lean=False)
    for key, curve in trainer.items():
        assert len(curve["val_loss"]) == len(curve["step"]) and all(
            0 < loss < 10 for loss in curve["val_loss"]
        )
        assert {name: values for name, values in curve.items() if name != "val_loss"} == plain[key]


def test_a_stack_keeps_the_same_but_for_rounding():
    stacked, alone = kept(trials(), size=4, **KEPT), kept(trials(), **KEPT)
    for key, curve in alone.items():
        assert stacked[key]["val_loss"] == pytest.approx(curve["val_loss"], rel=1e-4)


def test_any_metric_of_any_module(tmp_path):
    model = {**MODEL, "class_path": "tests.unit.study.test_metrics_kept.AlsoConfident"}
    used = Workload(model, DATA, {"accelerator": "cpu"})
    (curve,) = kept(trials()[:1], used, metrics=("confidence", "val_loss")).values()
    assert len(curve["confidence"]) == len(curve["step"]) and all(
        0.1 < c <= 1 for c in curve["confidence"]
    )


def together() -> list[float]:
    (curve,) = kept(trials()[1:2], lean=False, **KEPT).values()
    return [round(loss, 4) for loss in curve["val_loss"]]


def test_several_ranks_keep_it_of_the_whole_split():
    assert same_on_ranks(2, together) == together()


@pytest.mark.parametrize("lean", [True, False])
def test_it_goes_on_from_a_checkpoint(tmp_path, lean):
    study = Study(tmp_path, goal={**SHORT, "error": 0.01}, lean=lean, **KEPT)
    assert_goes_on(study, Trial(Cell(100, 0.9), 1, PARAMS), (2, 3))


def setup(folder: str = "", **study) -> StudySetup:
    space = {"model.learning_rate": Range(1e-3, 1.0, "log")}
    config = StudyConfig(space=space, trials=1, batch_sizes=[16], sparsities=[0.5], **study)
    pruning = {"method": "snip", "biases": "paper", "batch_size": 100}
    return setup_of(
        config,
        StorageConfig(folder) if folder else StorageConfig(),
        WORKLOAD,
        {**GOAL, "early_reject": True},
        pruning,
        {"interval": None},
    )


def test_a_study_says_which_and_looks_at_the_whole_split():
    check(setup(metrics=["val_loss"]))
    assert setup(metrics=["val_loss"]).goal.early_reject is False
    assert setup(metrics=["val_loss"]).identity(None)["study"]["metrics"] == ["val_loss"]
    assert "metrics" not in setup().identity(None)["study"]


@pytest.mark.parametrize(
    "later", [{"sampler": "sobol"}, {"noise_scale": True}, {"noise_scale": False}, {"goals": []}]
)
def test_keys_that_came_later_leave_the_identity_of_earlier_studies(later):
    assert setup(**later).identity(None) == setup().identity(None)
    assert not {"sampler", "noise_scale"} & setup().identity(None)["study"].keys()
    assert setup(sampler="tpe").identity(None)["study"]["sampler"] == "tpe"


@pytest.mark.parametrize(
    ("metrics", "key", "value"),
    [
        (["val_loss", "val_loss"], "study.metrics", ["val_loss", "val_loss"]),
        (["val_error"], "study.metrics", "val_error"),
        (["step"], "study.metrics", "step"),
        (["accuracy"], "study.metrics", "accuracy"),
    ],
)
def test_metrics_that_are_not_there_are_refused(metrics, key, value):
    with refuses(key, value):
        check(setup(metrics=metrics))


def test_a_stored_metric_whose_name_became_a_column_is_kept_beside_it(tmp_path):
    made = setup(str(tmp_path), metrics=["examples", "point"])
    with refuses("study.metrics", "examples"):
        check_study(made)
    data, _ = set_up_data(made)
    cell = Cell(16, 0.5)
    curve = {
        "step": [8],
        "val_error": [0.1],
        "train_loss": [1.0],
        "examples": [7.5],
        "point": [3.5],
    }
    write_study(
        made.storage.optuna_url,
        {cell: [result(cell, 0, 8, params={"model.learning_rate": 0.1}, curve=curve)]},
        made.study.name,
        space=made.study.space,
        goal=made.built_goal,
        identity=made.identity(data),
        config=made.config(),
    )
    assert not check_study(made).trials_remain
    record = read_study(made.storage.optuna_url, made.study.name)
    analysis = Analysis(record)
    (row,) = analysis.trial_curves.to_dict("records")
    assert (row["point"], row["point (metric)"], row["examples (metric)"]) == (0, 3.5, 7.5)
    (row,) = analysis.quality.to_dict("records")
    assert (row["point"], row["point (metric)"]) == (0, 3.5)
    # A metric of this name is no count of examples.
    assert analysis.answer["examples"].tolist() == [8 * 16]
