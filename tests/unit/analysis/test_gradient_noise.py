"""The noise of the gradient along training: its line, what is resolved of it, its table and figure,
its key."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader

from lit_dps.analysis.gradient_noise import Readings, noise_law, readings_of
from lit_dps.core.config import StorageConfig, StudyConfig
from lit_dps.core.trial import Cell
from lit_dps.data import GradientNoise
from lit_dps.models import NoisyQuadratic
from lit_dps.report.figures import FIGURES, drawn, write_figures
from lit_dps.storage.schema import decode_result, encode_result
from lit_dps.study.setup import StudySetup
from lit_dps.training.workload import Workload
from tests.support.fake_study import analysis_of, result
from tests.support.measured import lipschitz
from tests.support.setups import setup_of
from tests.support.texts import figure_texts
from tests.support.tiny import fit

pytestmark = pytest.mark.pictures

FIGURE = next(figure for figure in FIGURES if figure.NAME == "noise")


class Multiplicative(LightningModule):
    """Example a has the loss a |w|^2 / 2: the gradient is a w, and so its noise Var a |w|^2: M =
    Var a, sigma^2 = 0."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor([1.0, -2.0]))

    def training_step(self, a, batch_idx):
        return (a * self.w.square().sum() / 2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def measured(module, data, steps=24) -> dict[str, list[float]]:
    callback = lipschitz(interval=1, noise=True)
    fit(module, data, callbacks=[callback], max_steps=steps)
    return callback.columns["lipschitz"]


def law_of(curve):
    return noise_law([readings_of(result(Cell(4), 0, 16, readings={"lipschitz": curve}))])


def test_noise_that_is_the_same_everywhere_is_all_sigma():
    """The noisy quadratic: sigma^2 = sum h of each copy, M = 0 (`NoisyQuadraticModel.noise`)."""
    law = law_of(measured(NoisyQuadratic(6, 3, learning_rate=0.3), GradientNoise(8)))
    assert law.variance == pytest.approx(3 * (1 + 1 / 2 + 1 / 3 + 1 / 4 + 1 / 5 + 1 / 6), rel=1e-4)
    assert law.is_variance_significant
    assert abs(law.factor) < 1e-4


def test_noise_that_grows_with_the_gradient_is_all_m():
    examples = torch.tensor([0.5, 1.5, 2.0, 0.0])
    law = law_of(measured(Multiplicative(), DataLoader(examples, 4)))
    assert (
        law.factor == pytest.approx(float(examples.var(correction=0)), rel=1e-4)
        and law.is_factor_significant
    )
    assert abs(law.variance) < 1e-4


def made(seed, n=40, sigma=0.0, m=0.0, spread=0.1):
    rng = np.random.default_rng(seed)
    x = np.geomspace(10, 0.1, n)
    return Readings(x, (sigma + m * x) * rng.lognormal(0, spread, n))


def test_a_line_is_found_again_and_its_intervals_hold_it():
    held = {"variance": 0, "factor": 0}
    for seed in range(100):
        law = noise_law([made((seed, i), sigma=2.0, m=0.5) for i in range(5)])
        held["variance"] += abs(law.variance - 2.0) <= law.quantile * law.variance_error
        held["factor"] += abs(law.factor - 0.5) <= law.quantile * law.factor_error
        assert law.is_variance_significant and law.is_factor_significant and law.groups == 5
    assert all(85 <= count <= 100 for count in held.values()), held


def test_what_is_not_there_is_not_resolved():
    without = [noise_law([made((seed, i), sigma=2.0) for i in range(5)]) for seed in range(50)]
    assert sum(law.is_factor_significant for law in without) <= 5  # one-sided: 2.5 % by chance
    assert all(law.is_variance_significant for law in without)


def test_too_little_to_tell():
    x, y = np.array([1.0, 2, 3]), np.array([1.0, 2, 3])
    assert noise_law([Readings(x, y)]) is None and noise_law([]) is None
    assert noise_law([Readings(np.ones(9), np.ones(9))]) is None  # one gradient: no line


def study(config=None):
    cells = {}
    for b in (4, 16):
        for sparsity in (0.0, 0.9):
            cell = Cell(b, sparsity)
            cells[cell] = []
            for point in range(3):
                x, y = made((b, round(10 * sparsity), point), n=12, sigma=2.0, m=0.5)
                curve = {"step": list(range(12)), "lipschitz": [1.0] * 12}
                curve |= {"squared_gradient": x.tolist(), "noise": [*y[:-1].tolist(), float("nan")]}
                cells[cell].append(
                    result(cell, point, 160 + 16 * point, readings={"lipschitz": curve})
                )
    return analysis_of(cells, space={}, config=config or {"smoothness": {"noise": True}})


def test_table_and_figure(tmp_path, golden):
    found = study()
    laws = found.noise_law_of_series
    assert len(laws) == 2
    for law in laws.values():
        assert law.measurements == 2 * 33
        assert abs(law.variance - 2) < 0.5 and law.is_variance_significant
    files, notes = write_figures([FIGURE], [found], tmp_path)
    assert {path.name for path in files} == {
        "noise.csv",
        "noise.png",
        "noise.pdf",
    } and notes == []
    figure = drawn(FIGURE, found)
    left, right = figure.axes
    golden.check("figures/noise.txt", figure_texts(figure))
    *sizes, line = left.get_legend_handles_labels()[1]
    assert len(sizes) == 2 and "σ²" in line


def test_a_study_without_it_says_nothing_of_it(tmp_path):
    plain = analysis_of({Cell(4): [result(Cell(4), 0, 160)]}, space={})
    assert write_figures([FIGURE], [plain], tmp_path) == ([], [])
    assert "smoothness.noise" in FIGURE.missing(plain)
    assert plain.noise_law_of_series == {}


def test_it_is_stored_and_older_results_have_none():
    curve = {"step": [1], "lipschitz": [1.0], "squared_gradient": [2.0]}
    one = result(
        Cell(4),
        0,
        16,
        readings={"lipschitz": {**curve, "noise": [3.0]}},
    )
    assert decode_result(encode_result(one), one.trial).readings["lipschitz"]["noise"] == [3.0]
    older = dataclasses.replace(one, readings={"lipschitz": curve})
    assert readings_of(older) is None


def nqm(**smoothness) -> StudySetup:
    model = {"class_path": "lit_dps.models.NoisyQuadratic", "init_args": {}}
    data = {"class_path": "lit_dps.data.GradientNoise", "init_args": {"batch_size": 4}}
    goal = {"metric": "val_loss", "at_most": 0.1, "check_interval": 1, "max_steps": 10}
    trainer = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False}
    study = StudyConfig(batch_sizes=[4], sparsities=[0.0])
    return setup_of(study, StorageConfig(), Workload(model, data, trainer), goal, {}, smoothness)


def test_the_identity_of_studies_without_it_is_as_before():
    def identity(**smoothness):
        return nqm(**smoothness).identity(None)

    assert identity(interval=4, noise=False) == identity(interval=4)
    assert identity(interval=4, noise=True) != identity(interval=4)
    assert "noise" not in identity(interval=4)["smoothness"]
