"""The claim on two studies, and all claims on several."""

import dataclasses

import pytest

from lit_dps.analysis.analysis import Analysis
from lit_dps.replication.claims import judge_claims, paper_claims, studies_by_verdict
from lit_dps.replication.optimizers import (
    steps_ratio_change_of_optimizers,
    steps_ratio_of_optimizers,
)
from tests.support.claims import judged
from tests.unit.replication.test_claims import (
    MOMENTUM,
    NOT_SEEN,
    POWERS,
    SEEN,
    SGD,
    UNDECIDABLE,
    law,
    study_of,
)


@pytest.mark.parametrize(("c1", "verdict"), [(3e6, SEEN), (1e6, UNDECIDABLE), (3e5, NOT_SEEN)])
def test_momentum_against_sgd(c1, verdict):
    sgd = study_of(law(1e6, 1000, POWERS), "sgd", config=SGD)
    momentum = study_of(law(c1, 1000, POWERS), "momentum", config=MOMENTUM)
    assert judged("critical-of-momentum", momentum, sgd).verdict is verdict
    assert judged("critical-of-momentum", sgd, momentum) is None
    assert judged("critical-of-momentum", sgd, sgd) is None
    assert (
        judged("critical-of-momentum", momentum, study_of(law(1e6, 1000, [2]), "begun", config=SGD))
        is None
    ), "no curve"


def test_only_studies_of_one_workload_are_compared():
    sgd = study_of(law(1e6, 1000, POWERS), "sgd", config=SGD)
    other = MOMENTUM | {"data": {"class_path": "CIFAR10"}}
    assert (
        judged("critical-of-momentum", study_of(law(3e6, 1000, POWERS), "m", config=other), sgd)
        is None
    )
    decay = {
        **MOMENTUM,
        "model": {"init_args": MOMENTUM["model"]["init_args"] | {"schedule": "linear"}},
    }
    assert (
        judged(
            "critical-of-momentum", study_of(law(3e6, 1000, POWERS), "momentum", config=decay), sgd
        )
        is None
    )
    grasp = MOMENTUM | {"pruning": {"method": "grasp"}}
    snip = dataclasses.replace(sgd.record, config=SGD | {"pruning": {"method": "snip"}})
    assert (
        judged(
            "critical-of-momentum",
            study_of(law(3e6, 1000, POWERS), "m", config=grasp),
            Analysis(snip),
        )
        is None
    )
    batch = MOMENTUM | {"data": {"class_path": "MNIST", "init_args": {"batch_size": 64}}}
    same = study_of(law(3e6, 1000, POWERS), "momentum", config=batch)
    assert judged("critical-of-momentum", same, sgd).verdict is SEEN
    assert (
        judged(
            "critical-of-momentum",
            study_of(law(3e6, 1000, POWERS, 0.9), "momentum", config=MOMENTUM),
            sgd,
        )
        is None
    )


@pytest.mark.parametrize(
    "other",
    [
        {"trainer": {"gradient_clip_val": 1.0}},
        {"batch": {"schedule": "linear", "options": {"start": 0.25, "steps": 100}}},
        {"optim": {"delay": 4}},
        {"pruning": {"options": {"batches": 10}}},
    ],
)
def test_a_setting_that_one_configuration_lacks_has_its_default(other):
    sgd = study_of(law(1e6, 1000, POWERS), "sgd", config=SGD)
    momentum = law(3e6, 1000, POWERS)
    assert (
        judged("critical-of-momentum", study_of(momentum, "m", config=MOMENTUM | other), sgd)
        is None
    )
    trainer = {"gradient_clip_val": None, "precision": "32-true"}
    defaults = {"trainer": trainer, "batch": None, "optim": {"delay": 0}}
    same = study_of(momentum, "m", config=MOMENTUM | defaults)
    assert judged("critical-of-momentum", same, sgd) is not None


@pytest.mark.usefixtures("certain_searches")
def test_one_row_a_claim_and_study():
    sgd = study_of(law(1e6, 1000, POWERS), "sgd", config=SGD)
    momentum = study_of(law(3e6, 1000, POWERS), "momentum", config=MOMENTUM)
    rows = judge_claims([momentum, sgd], {name: f"make {name}" for name in ("sgd", "momentum")})
    assert {row.claim for row in rows} == set(paper_claims())
    by_claim = {claim.id: [row for row in rows if row.claim is claim] for claim in paper_claims()}
    assert [row.studies for row in by_claim["linear-scaling"]] == [("momentum",), ("sgd",)]
    (both,) = by_claim["critical-of-momentum"]
    assert both.studies == ("momentum", "sgd")
    assert both.command.split(" && ") == ["make momentum", "make sgd"]
    (missing,) = by_claim["steps-of-sparse"]
    assert (missing.studies, missing.verdict) == ((), UNDECIDABLE)
    counted = {claim.id: verdicts for claim, verdicts in studies_by_verdict(rows).items()}
    assert counted["linear-scaling"] == {SEEN: ["momentum", "sgd"]}
    ((verdict, (names,)),) = counted["critical-of-momentum"].items()
    assert verdict is SEEN and names.split()[::2] == ["momentum", "sgd"]
    assert counted["steps-of-sparse"] == {UNDECIDABLE: []}


def test_the_steps_of_momentum_against_sgd_at_the_ends():
    """K* of momentum is equal at B = 2, and a third at the largest batch size."""
    sgd = study_of(law(1e6, 1e4, POWERS), "sgd", config=SGD)
    momentum = study_of(law(1e6, 1e4 / 3, POWERS), "momentum", config=MOMENTUM)
    at_largest = steps_ratio_of_optimizers(momentum, sgd, "sgd")["S=0"]
    exact = (1e6 / 16384 + 1e4 / 3) / (1e6 / 16384 + 1e4)
    assert at_largest.number.value == pytest.approx(exact, rel=1e-3)
    change = steps_ratio_change_of_optimizers(momentum, sgd, "sgd")["S=0"]
    at_smallest = (1e6 / 2 + 1e4 / 3) / (1e6 / 2 + 1e4)
    assert change.number.value == pytest.approx(exact / at_smallest, rel=1e-3)
    for claim in ("momentum-saves-steps", "momentum-saves-more-at-large-batches"):
        assert judged(claim, momentum, sgd).verdict is SEEN
        assert judged(claim, sgd, momentum) is None
    # A third everywhere saves steps, and no more of them at large batches.
    third = study_of(law(1e6 / 3, 1e4 / 3, POWERS), "momentum", config=MOMENTUM)
    assert judged("momentum-saves-steps", third, sgd).verdict is SEEN
    assert judged("momentum-saves-more-at-large-batches", third, sgd).verdict is UNDECIDABLE
    later = study_of(law(1e6 / 3, 1e4, POWERS), "momentum", config=MOMENTUM)
    assert judged("momentum-saves-more-at-large-batches", later, sgd).verdict is NOT_SEEN
