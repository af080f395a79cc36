"""A trial's Sobol point is that of stock Optuna, and depends on its point index alone."""

import math
import warnings

import numpy as np
import optuna
import pytest
from optuna.distributions import FloatDistribution, IntDistribution
from optuna.samplers import QMCSampler

from lit_dps.core.search_space import Range
from lit_dps.storage.samplers import SobolSampler, distributions, sobol_point
from tests.support.errors import raises_about

SPACE = {  # not in the order of the keys
    "model.momentum": Range(0.9, 0.9999, "reverse_log"),
    "model.learning_rate": Range(1e-4, 10.0, "log"),
    "model.end_factor": Range(0.001, 0.5),
    "model.decay_steps": Range(100, 200, integer=True),
}


@pytest.fixture(autouse=True)
def quiet():
    optuna.logging.set_verbosity(optuna.logging.WARNING)


def stock_points(dists, n: int, seed: int) -> list[dict]:
    """The first n points of Optuna's own sampler over these distributions."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        study = optuna.create_study(sampler=QMCSampler(scramble=True, seed=seed))
        study.add_trial(  # the first trial tells it the space; it is no Sobol point
            optuna.trial.create_trial(
                state=optuna.trial.TrialState.COMPLETE,
                params={key: dist.low for key, dist in dists.items()},
                distributions=dists,
                value=0.0,
            )
        )
        return [study.ask(dists).params for _ in range(n)]


def by_hand(u: dict[str, float]) -> dict:
    return {
        "model.decay_steps": math.floor(100 + 101 * u["model.decay_steps"]),
        "model.end_factor": 0.001 + 0.499 * u["model.end_factor"],
        "model.learning_rate": 1e-4 * 10 ** (5 * u["model.learning_rate"]),
        "model.momentum": 1 - 0.1 * 10 ** (-3 * u["model.momentum"]),
    }


@pytest.mark.parametrize("seed", [0, 4_000_000_000])
def test_points_are_those_of_the_stock_sampler(seed):
    units = stock_points({key: FloatDistribution(0, 1) for key in sorted(SPACE)}, 20, seed)
    for index, u in enumerate(units):
        ours = sobol_point(SPACE, seed, index)
        assert ours == pytest.approx(by_hand(u), rel=1e-9), (
            index
        )  # 1 - x near 0.9999 costs some digits
        assert list(ours) == sorted(SPACE)


def test_linear_log_and_integer_values_are_those_that_the_stock_sampler_would_store():
    space = {key: box for key, box in SPACE.items() if box.scale != "reverse_log"}
    stock = stock_points(
        {
            "model.decay_steps": IntDistribution(100, 200),
            "model.end_factor": FloatDistribution(0.001, 0.5),
            "model.learning_rate": FloatDistribution(1e-4, 10.0, log=True),
        },
        20,
        3,
    )
    for index, theirs in enumerate(stock):
        assert sobol_point(space, 3, index) == pytest.approx(theirs, rel=1e-12), index


def test_a_point_depends_on_seed_space_and_index_alone():
    forwards = [sobol_point(SPACE, 0, i) for i in range(9)]
    np.random.seed(5)
    backwards = [sobol_point(dict(reversed(SPACE.items())), 0, i) for i in reversed(range(9))]
    assert forwards == backwards[::-1]
    assert len({tuple(point.values()) for point in forwards}) == 9
    assert sobol_point(SPACE, 1, 4) != forwards[4]


def test_2_to_the_m_points_put_one_into_each_of_as_many_parts_of_every_range():
    points = [sobol_point(SPACE, 11, i) for i in range(32)]
    for key, box in SPACE.items():
        if not box.integer:
            parts = sorted(int(32 * box.unit(point[key])) for point in points)
            assert parts == list(range(32)), key


def test_the_plain_sequence_begins_at_the_low_ends_and_their_middle():
    space = {key: box for key, box in SPACE.items() if not box.integer}
    first, second = (sobol_point(space, 0, i, scramble=False) for i in (0, 1))
    assert first == pytest.approx({key: box.low for key, box in space.items()}, rel=1e-12)
    assert [space[key].unit(value) for key, value in second.items()] == pytest.approx(
        [0.5] * 3, abs=1e-10
    )


def test_distributions_have_the_scales_that_optuna_knows():
    assert distributions(SPACE) == {
        "model.decay_steps": IntDistribution(100, 200),
        "model.end_factor": FloatDistribution(0.001, 0.5),
        "model.learning_rate": FloatDistribution(1e-4, 10.0, log=True),
        "model.momentum": FloatDistribution(0.9, 0.9999),
    }


def ask(study, points) -> list[dict]:
    asked = []
    for point in points:
        study.enqueue_trial({}, user_attrs={"point": point})
        asked.append(study.ask(fixed_distributions=distributions(SPACE)).params)
    return asked


@pytest.mark.parametrize("scramble", [True, False])
@pytest.mark.parametrize(
    "order", [[0, 1, 2, 3], [3, 0, 2, 1], [2, 2, 0, 2]], ids=["counted", "mixed", "retried"]
)
def test_a_trial_that_is_asked_gets_the_point_it_names(order, scramble):
    """Each is the first trial of a fresh study, or comes after others, or repeats one."""
    study = optuna.create_study(sampler=SobolSampler(SPACE, 6, scramble))
    assert ask(study, order) == [sobol_point(SPACE, 6, point, scramble) for point in order]


def test_a_trial_retried_by_another_process_gets_the_same_point(tmp_path):
    url = f"sqlite:///{tmp_path}/study.db"
    first = optuna.create_study(storage=url, study_name="s", sampler=SobolSampler(SPACE, 6))
    params = ask(first, [0, 1])
    first.tell(1, state=optuna.trial.TrialState.FAIL)
    second = optuna.load_study(storage=url, study_name="s", sampler=SobolSampler(SPACE, 6))
    assert ask(second, [1]) == [params[1]]
    assert [trial.params for trial in second.trials] == [params[0], params[1], params[1]]


def test_a_parameter_outside_the_space_is_an_error_and_not_a_random_draw():
    study = optuna.create_study(sampler=SobolSampler(SPACE, 0))
    study.enqueue_trial({}, user_attrs={"point": 0})
    with raises_about(KeyError, "other"):
        study.ask({"other": FloatDistribution(0, 1)})
