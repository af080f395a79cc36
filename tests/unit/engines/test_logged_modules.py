"""Modules that know nothing of lit_dps train in a stack as in Lightning's loop, or say why not."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from lightning.pytorch import Callback
from torch.utils.data import DataLoader, RandomSampler

from lit_dps.core.goal import Goal
from lit_dps.core.trial import LIGHTNING, Cell, Trial
from lit_dps.engines import trial_engine
from lit_dps.engines.eligible import ineligibility_reason
from lit_dps.engines.loader_data import Examples
from lit_dps.engines.logged_module import MeanOverBatches, Unknown
from lit_dps.engines.module_hooks import NeedsLightning
from lit_dps.engines.stack import StackedNetworks
from lit_dps.engines.trial_engine import TrialEngine
from lit_dps.module import ImageClassifier
from lit_dps.parallel.process import Interrupted
from lit_dps.readings import Reading
from lit_dps.readings.registry import resolve_readings
from lit_dps.training.checkpoint_files import Checkpoints
from lit_dps.training.workload import Workload
from tests.support.conformance import assert_conform, by_trial
from tests.support.errors import raises_about
from tests.support.runs import engine, runs, train
from tests.support.setups import training_of
from tests.unit.engines.test_engine import quiet  # noqa: F401
from tests.zoo.animals.data import TRAIN, VALIDATION, Clouds
from tests.zoo.run import spec

CPU = {"accelerator": "cpu"}
GOAL = {"error": 0.04, "check_interval": 4, "max_steps": 24}
RATES = (0.01, 0.001, 0.003)


def workload(model="models.Net", data="data.Clouds", trainer=None, **arguments) -> Workload:
    return Workload(spec(model, **arguments), spec(data), {"accelerator": "cpu", **(trainer or {})})


def trials(*cells: Cell, rates=RATES) -> list[Trial]:
    return [Trial(cell, i, {"model.lr": rate}) for cell in cells for i, rate in enumerate(rates)]


def both(used: Workload, asked: list[Trial], goal=GOAL, **options):
    """Results in a stack and in Lightning's loop."""
    stacked = train(asked, used, goal, size=4, **options)
    return stacked, train(asked, used, goal, lean=False, **options)


CLIPPED = {"gradient_clip_val": 0.2}
STACKED = [
    ("models.Net", "data.Clouds", None),
    ("parts.BatchNorm", "data.Clouds", CLIPPED),
    ("parts.Attentive", "data.OwnOrder", None),
    ("steps.ReturnsDict", "data.AsksTheTrainer", None),
    ("metrics.ByAccuracies", "data.Clouds", None),
]
MORE = [
    ("parts.Tied", "data.Cached", None),
    ("parts.OwnNorms", "data.WithWeights", CLIPPED),
    ("optimizers.WithDecay", "data.Clouds", None),
    ("steps.OneArgument", "data.Clouds", None),
    ("dry_runs.Contrastive", "data.Clouds", None),
    ("dry_runs.RootOfBatch", "data.Clouds", None),
    ("dry_runs.Pretrained", "data.Clouds", None),
    ("foreign.Keywords", "data.Clouds", None),
    ("metrics.ComputedAtTheEnd", "data.Clouds", None),
]


@pytest.mark.parametrize(
    ("model", "data", "trainer"),
    [*STACKED, *(pytest.param(*each, marks=pytest.mark.long) for each in MORE)],
)
def test_a_stack_of_strangers_ends_as_in_lightning_s_loop(model, data, trainer):
    asked = trials(Cell(16, 0.0), Cell(16, 0.8))
    ours, reference = both(workload(model, data, trainer), asked, metrics=("val_loss",))
    assert {(result.engine, result.engine_reason) for result in ours} == {("stacked", "")}
    assert assert_conform(ours, reference, Goal.from_dict(GOAL), VALIDATION) == []
    theirs = {(result.trial.cell, result.trial.point): result for result in reference}
    for result in ours:
        expected = theirs[result.trial.cell, result.trial.point].curve["val_loss"]
        assert result.curve["val_loss"] == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("kind", ["cosine_steps", "cosine_epochs", "halving"])
def test_schedules_of_steps_and_epochs_are_followed(kind):
    asked = trials(Cell(16, 0.0), rates=(0.03, 0.01))
    used = workload("schedules.Scheduled", kind=kind)
    goal = {**GOAL, "error": 0.001}
    ours, reference = both(used, asked, goal)
    assert {(result.engine, result.engine_reason) for result in ours} == {("stacked", "")}
    assert assert_conform(ours, reference, Goal.from_dict(goal), VALIDATION) == []
    for mine, theirs in zip(ours, reference, strict=True):
        shape = {key: value for key, value in mine.flags.items() if key != "stacked"}
        assert shape == theirs.flags, "the lengths of warm-up and schedule"


class KeepsState(Callback):
    """Keeps the last state of each module."""

    def __init__(self):
        self.states = []

    def on_train_end(self, trainer, pl_module):
        state = pl_module.state_dict()
        self.states.append({name: tensor.clone() for name, tensor in state.items()})


STRANGERS = [
    ("strangers.Perceptron", "strangers.DigitLoaders", {"dropout": 0.0}),
    ("strangers.SmallResNet", "strangers.DigitLoaders", {}),
    pytest.param(
        "strangers.CharacterTransformer",
        "strangers.TextLoaders",
        {"dropout": 0.0},
        marks=pytest.mark.long,
    ),
]


@pytest.mark.parametrize(("model", "data", "arguments"), STRANGERS)
def test_weights_and_running_statistics_are_those_of_lightning_s_loop(
    model, data, arguments, monkeypatch
):
    used = workload(model, data, {"gradient_clip_val": 0.5}, **arguments)
    goal = {"metric": "val_loss", "at_most": 0.01, "check_interval": 2, "max_steps": 4}
    asked = trials(Cell(32, 0.5), rates=(0.001, 0.003))
    reference = KeepsState()
    settings = training_of(used, goal)
    lightning = TrialEngine(settings, engine=LIGHTNING, callbacks=(reference,))
    assert len(list(lightning.train(runs(asked, goal)))) == 2
    stacks = []
    make = StackedNetworks.__init__

    def keep(self, *args, **kwargs):
        make(self, *args, **kwargs)
        stacks.append((self, list(self.runs)))

    monkeypatch.setattr(StackedNetworks, "__init__", keep)
    results = train(asked, used, goal, size=4)
    assert [result.engine for result in results] == ["stacked", "stacked"]
    ((stack, stacked_runs),) = stacks
    for row, expected in enumerate(reference.states):
        stack.runs[row] = stacked_runs[row]
        stack.write_back_weights(row)
        state = stacked_runs[row].module.state_dict()
        assert state.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(state[name], tensor, rtol=2e-3, atol=2e-5)


@pytest.mark.parametrize(
    ("model", "arguments"),
    [
        ("parts.BatchNorm", {}),
        pytest.param("schedules.Scheduled", {"kind": "halving"}, marks=pytest.mark.long),
        ("tricky.Prototypes", {}),
    ],
)
def test_an_interrupted_stack_of_strangers_resumes_from_its_checkpoints(model, arguments, tmp_path):
    used = workload(model, **arguments)
    goal = {"metric": "val_loss", "at_most": 1e-6, "check_interval": 4, "max_steps": 24}
    asked = trials(Cell(16, 0.0))
    checkpoints = Checkpoints(tmp_path, "study", minutes=0)
    checks = []

    def raise_if_stopped() -> None:
        checks.append(1)
        if len(checks) == 3:
            raise Interrupted("test")

    interrupted = engine(used, goal, size=4, checkpoints=checkpoints)
    with pytest.raises(Interrupted):
        list(interrupted.train(runs(asked, goal), raise_if_stopped))
    assert len([*tmp_path.rglob("*.ckpt")]) == 3
    resumed = train(
        asked, used, goal, size=4, checkpoints=checkpoints, raise_if_stopped=raise_if_stopped
    )
    unbroken = train(asked, used, goal, size=4)
    assert len(checks) == 3 + 2, "three checks were before the interruption"
    for ours, expected in zip(resumed, unbroken, strict=True):
        assert ours.curve["step"] == [4, 8, 12, 16, 20, 24]
        assert ours.curve["val_loss"] == pytest.approx(expected.curve["val_loss"], rel=1e-4)


def test_modules_that_differ_from_the_second_step_on_train_in_two_stacks():
    asked = []
    for point, epsilon in enumerate((0.01, 0.5)):
        params = {"model.lr": 0.01, "model.epsilon": epsilon}
        asked.append(Trial(Cell(16, 0.0), point, params))
    used = workload("tricky.WarmsUpSmoothing", epsilon=0.1)
    ours, reference = both(used, asked)
    assert assert_conform(ours, reference, Goal.from_dict(GOAL), VALIDATION) == []
    assert "its module or data differ" in max(result.engine_reason for result in ours)


def test_the_last_attempt_alone_trains_in_a_stack_of_one():
    asked = trials(Cell(16, 0.0), rates=(0.01,))
    (result,) = train(asked, workload(), GOAL, size=4)
    assert (result.engine, result.engine_reason) == ("stacked", "")


def test_dropout_of_strangers_is_stacked():
    asked = trials(Cell(16, 0.0), rates=(0.01, 0.01))
    first, second = train(asked, workload("passes.Dropout"), GOAL, size=4)
    assert (first.engine, second.engine) == ("stacked", "stacked")
    assert first.curve["train_loss"] != second.curve["train_loss"]


def test_trials_with_other_data_leave_the_stack():
    asked = trials(Cell(16, 0.0))
    ours, reference = both(workload(data="data.SplitBySeed"), asked)
    reasons = sorted(result.engine_reason for result in ours)
    assert reasons[0] == "" and "its module or data differ" in reasons[1]
    assert assert_conform(ours, reference, Goal.from_dict(GOAL), VALIDATION) == []


class ShowsLength(Clouds):
    """Reads the length of training when it is set up."""

    lengths: ClassVar[list[int]] = []

    def setup(self, stage: str | None = None) -> None:
        self.lengths.append(self.trainer.max_steps)
        super().setup(stage)


@pytest.mark.parametrize("lean", [True, False])
def test_the_setup_of_data_sees_the_length_of_training(lean):
    used = Workload(spec("models.Net"), {"class_path": f"{__name__}.ShowsLength"}, CPU)
    ShowsLength.lengths.clear()
    (result,) = train(trials(Cell(16, 0.0), rates=(0.01,)), used, GOAL, lean=lean, size=4)
    assert result.engine == ("stacked" if lean else "lightning")
    assert set(ShowsLength.lengths) == {GOAL["max_steps"]}


class DrawsSteps(Clouds):
    """Draws the examples of 3 steps in an epoch."""

    def train_dataloader(self):
        size = self.hparams.batch_size
        return DataLoader(self.train, size, sampler=RandomSampler(self.train, num_samples=3 * size))


@pytest.mark.parametrize("lean", [True, False])
def test_pruning_scores_of_other_examples_are_not_used_again(lean):
    used = Workload(spec("models.Net"), {"class_path": f"{__name__}.DrawsSteps"}, CPU)
    asked = trials(Cell(8, 0.8), Cell(40, 0.8), rates=(0.01,))
    goal = {**GOAL, "max_steps": 4}
    small, large = train(asked, used, goal, lean=lean, size=4)
    (alone,) = train(asked[1:], used, goal, lean=lean, size=4)
    assert large.curve == alone.curve and large.kept == alone.kept
    assert small.kept != large.kept


def test_trials_whose_running_statistics_have_another_momentum_leave_the_stack():
    """`model.momentum` is also the name of a hyperparameter, which trials of a stack may not
    share."""
    cell = Cell(32, 0.0)
    asked = [Trial(cell, i, {"model.momentum": momentum}) for i, momentum in enumerate((0.1, 0.2))]
    used = workload("strangers.BatchNormMomentum", "strangers.DigitLoaders")
    results = train(asked, used, {**GOAL, "max_steps": 4}, size=4)
    assert sorted(result.engine for result in results) == ["lightning", "stacked"]
    assert "its module or data differ" in max(result.engine_reason for result in results)


def test_intervals_ahead_change_nothing():
    goal = {**GOAL, "error": 0.02}
    asked = trials(Cell(16, 0.0), Cell(16, 0.8))
    one, three = (
        train(asked, workload("parts.BatchNorm"), goal, size=4, ahead=ahead) for ahead in (1, 3)
    )
    curves = [{(r.trial.cell, r.trial.point): r.curve for r in results} for results in (one, three)]
    assert {result.engine for result in three} == {"stacked"}
    assert curves[0].keys() == curves[1].keys()
    for key, curve in curves[0].items():
        assert curves[1][key]["val_error"] == curve["val_error"]
        assert curves[1][key]["train_loss"] == pytest.approx(curve["train_loss"], rel=1e-4)


@pytest.mark.parametrize(
    ("model", "data", "trainer", "reason"),
    [
        ("optimizers.MaxNorm", "data.Clouds", None, "overrides on_train_batch_end"),
        ("optimizers.Manual", "data.Clouds", None, "manual optimization"),
        ("optimizers.WithLookahead", "data.Clouds", None, "no stackable update rule"),
        ("schedules.Scheduled", "data.Clouds", None, "changes more than the rate"),
        ("steps.SkipsSome", "data.Clouds", None, "uses batch_idx in a training step"),
        ("steps.Fails", "data.Clouds", None, "reads trainer.global_step"),
        ("idle.Swallowing", "data.Clouds", None, "reads trainer.current_epoch"),
        ("forgetful.HiddenCounter", "data.Clouds", None, "differs under torch.vmap"),
        ("dry_runs.TrainsBeforeItValidates", "data.Clouds", None, "changes an attribute"),
        ("dry_runs.Denoising", "data.Clouds", None, "draws random numbers in validation_step"),
        ("passes.NumpyNoise", "data.Clouds", None, "random numbers of NumPy"),
        ("passes.Memory", "data.Clouds", None, "changes the shape of its buffer bank"),
        ("strangers.KeepsList", "strangers.DigitLoaders", None, "not its parameters or buffers"),
        ("tricky.Padded", "data.Clouds", None, "the gradient of body.0.weight"),
        ("parts.FrozenBackbone", "data.SplitOnce", None, "body.0.weight of FrozenBackbone has no"),
        ("tricky.Calibrated", "data.Clouds", None, "scale of Calibrated has no gradient"),
        ("tricky.Cautious", "data.Clouds", None, "reads trainer.current_epoch"),
        ("tricky.TypedNumber", "data.Clouds", None, "uses batch_idx"),
        ("tricky.Normalizing", "data.Clouds", None, "validation_step of Normalizing changes"),
        ("tricky.Clips", "data.Clouds", None, "overrides clip_gradients"),
        ("metrics.ByMetric", "data.Clouds", None, "needs the value of a tensor"),
        ("metrics.Accuracy", "data.Clouds", None, "does not log val_error"),
        ("metrics.AtTheEnd", "data.Clouds", None, "overrides on_validation_epoch_start"),
        ("metrics.SharedObject", "data.Clouds", None, "train_accuracy.metric_b both in training"),
        ("edges.ConstantWeight", "data.Clouds", None, "batch_size=20 for a batch of 10"),
        ("models.Net", "data.Noisy", None, "as augmentation does"),
        ("models.Net", "data.Streamed", None, "a DataLoader of a map-style data set"),
        ("models.Net", "data.TwoValidations", None, "from val_dataloader"),
        ("models.Net", "data.CroppedValidation", None, "drops validation examples"),
        ("models.Net", "dry_runs.OwnSampler", None, "a custom sampler"),
        ("models.Net", "edges.TimeFirst", None, "one entry per example"),
        ("models.Net", "data.Clouds", {"accumulate_grad_batches": 2}, "accumulate_grad_batches"),
        ("models.Net", "data.Clouds", {"precision": "bf16-mixed"}, "trainer.precision"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_stacked_has_a_reason(model, data, trainer, reason):
    training = training_of(workload(model, data, trainer), GOAL)
    found = ineligibility_reason(training, trials(Cell(16, 0.0))[0], stacked=True)
    assert found is not None and reason in found


@pytest.mark.parametrize(("begin", "is_stacked"), [(250, False), (400, True)])
def test_a_schedule_that_changes_the_momentum_late_in_the_budget_is_not_stacked(begin, is_stacked):
    training = training_of(
        workload("schedules.LateOneCycle", begin=begin), {**GOAL, "max_steps": 300}
    )
    reason = ineligibility_reason(training, trials(Cell(16, 0.0))[0], stacked=True)
    assert (reason is None) == is_stacked


def test_an_object_of_torchmetrics_that_is_not_reset_is_not_stacked():
    training = training_of(workload("metrics.ComputedAtTheEnd", resets=False), GOAL)
    reason = ineligibility_reason(training, trials(Cell(16, 0.0))[0], stacked=True)
    assert reason == "ComputedAtTheEnd does not reset error.metric_b after a validation"


def test_the_reason_is_stored_with_a_trial_that_lightning_s_loop_trains():
    (result,) = train(trials(Cell(16, 0.0))[:1], workload("optimizers.MaxNorm"), GOAL, size=4)
    assert result.engine == "lightning"
    assert result.engine_reason == "MaxNorm overrides on_train_batch_end"
    loop = TrialEngine(training_of(workload(), GOAL), stack_size=1)
    choice = loop.choose(trials(Cell(16, 0.0))[0])
    assert (choice.engine, choice.reason) == ("lightning", "Net is not an ImageClassifier")


class Classifier(ImageClassifier):
    """An ImageClassifier without arguments."""

    def __init__(self):
        super().__init__(torch.nn.Linear(8, 4))


def test_the_loop_of_a_module_depends_on_its_type_and_not_on_words(monkeypatch):
    reasons = []

    def reason(training, trial, stacked=False):
        reasons.append(stacked)
        return f"{'stacked' if stacked else 'alone'}: this is no ImageClassifier"

    monkeypatch.setattr(trial_engine, "ineligibility_reason", reason)
    trial = Trial(Cell(16, 0.0), 0, {})
    for name in ("Classifier", "AbsentClass"):
        model = {"class_path": f"{__name__}.{name}"}
        used = Workload(model, spec("data.Clouds"), {"accelerator": "cpu"})
        choice = TrialEngine(training_of(used, GOAL), stack_size=4).choose(trial)
        assert (choice.engine, choice.reason.partition(":")[0]) == ("lightning", "alone")
    choice = TrialEngine(training_of(workload(), GOAL), stack_size=4).choose(trial)
    assert (choice.engine, choice.reason.partition(":")[0]) == ("lightning", "stacked")
    assert reasons == [True, False, True, False, True]


@pytest.mark.parametrize(
    "use", [lambda n: n % 2, lambda n: n == 0, bool, int, str, lambda n: [1][n], lambda n: -n]
)
def test_no_use_of_an_unknown_number_goes_unnoticed(use):
    with raises_about(NeedsLightning, "Net", "batch_idx"):
        use(Unknown("Net"))


def test_the_mean_over_batches_weighs_examples():
    means = MeanOverBatches()
    means.add({"val_error": torch.tensor([0.5, 0.0])}, 20)
    means.add({"val_error": torch.tensor([0.0, 1.0])}, 10)
    assert means.means()["val_error"].tolist() == pytest.approx([1 / 3, 1 / 3])


class ValidationLoss(Reading):
    """The mean loss of the validation batches, and the examples of the user's data set."""

    name = "validation"

    def read(self, moment):
        module = moment.module.eval()
        total = 0.0
        examples = 0
        for batch in moment.validation_batches():
            with torch.no_grad():
                total += float(module.loss(batch)) * len(batch[0])
            examples += len(batch[0])
        of_training = len(moment.data.train_dataloader().dataset)
        return {"loss": total / examples, "of_training": of_training}


@pytest.mark.long
def test_readings_of_a_stack_of_strangers_are_those_of_lightning_s_loop():
    names = [
        f"{__name__}.ValidationLoss",
        "gradient_norm",
        "gradient_noise",
        "tests.support.user_readings.Norm",
    ]
    options = {
        "readings": resolve_readings(
            [{"class_path": "lipschitz", "init_args": {"interval": 4}}, *names]
        ),
        "metrics": ("val_loss",),
    }
    goal = {**GOAL, "error": 0.001, "max_steps": 12}
    ours, reference = both(workload(), trials(Cell(16, 0.8)), goal, **options)
    theirs = by_trial(reference)
    for result in ours:
        expected = theirs[result.trial.cell, result.trial.point]
        assert (result.engine, expected.engine) == ("stacked", "lightning")
        assert result.readings.keys() == expected.readings.keys()
        for name, columns in expected.readings.items():
            assert result.readings[name].keys() == columns.keys()
            for column, values in columns.items():
                assert result.readings[name][column] == pytest.approx(values, rel=1e-3), column
        read = result.readings["validation"]
        assert read["loss"] == pytest.approx(result.curve["val_loss"], rel=1e-4)
        assert set(read["of_training"]) == {TRAIN}


def test_examples_with_a_nan_equal_only_examples_with_a_nan_there():
    nan = torch.tensor([1.0, float("nan")])
    assert Examples((nan,)).equals(Examples((nan.clone(),)))
    assert not Examples((nan,)).equals(Examples((torch.tensor([1.0, 0.0]),)))
    assert not Examples((nan,)).equals(Examples((nan.double(),)))
