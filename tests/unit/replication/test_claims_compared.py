"""The claim on two studies, and all claims on several."""

import dataclasses

import pytest

from lit_dps.analysis.analysis import Analysis
from lit_dps.replication.claims_critical import critical_of_momentum
from lit_dps.replication.claims_scaling import linear_scaling, steps_of_sparse
from lit_dps.replication.paper import CLAIMS, judge, overall
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


@pytest.mark.parametrize(("c1", "verdict"), [(3e6, SEEN), (1e6, NOT_SEEN), (3e5, NOT_SEEN)])
def test_momentum_against_sgd(c1, verdict):
    sgd = study_of(law(1e6, 1000, POWERS), "sgd", config=SGD)
    momentum = study_of(law(c1, 1000, POWERS), "momentum", config=MOMENTUM)
    assert critical_of_momentum(momentum, sgd).verdict is verdict
    assert critical_of_momentum(sgd, momentum) is None
    assert critical_of_momentum(sgd, sgd) is None
    assert (
        critical_of_momentum(momentum, study_of(law(1e6, 1000, [2]), "begun", config=SGD)) is None
    ), "no curve"


def test_only_studies_of_one_workload_are_compared():
    sgd = study_of(law(1e6, 1000, POWERS), "sgd", config=SGD)
    other = MOMENTUM | {"data": {"class_path": "CIFAR10"}}
    assert critical_of_momentum(study_of(law(3e6, 1000, POWERS), "m", config=other), sgd) is None
    decay = {
        **MOMENTUM,
        "model": {"init_args": MOMENTUM["model"]["init_args"] | {"schedule": "linear"}},
    }
    assert (
        critical_of_momentum(study_of(law(3e6, 1000, POWERS), "momentum", config=decay), sgd)
        is None
    )
    grasp = MOMENTUM | {"pruning": {"method": "grasp"}}
    snip = dataclasses.replace(sgd.record, config=SGD | {"pruning": {"method": "snip"}})
    assert (
        critical_of_momentum(study_of(law(3e6, 1000, POWERS), "m", config=grasp), Analysis(snip))
        is None
    )
    batch = MOMENTUM | {"data": {"class_path": "MNIST", "init_args": {"batch_size": 64}}}
    same = study_of(law(3e6, 1000, POWERS), "momentum", config=batch)
    assert critical_of_momentum(same, sgd).measured.startswith("S=0: B_crit = 3")
    assert (
        critical_of_momentum(
            study_of(law(3e6, 1000, POWERS, 0.9), "momentum", config=MOMENTUM), sgd
        )
        is None
    )


def test_one_row_a_claim_and_study():
    sgd = study_of(law(1e6, 1000, POWERS), "sgd", config=SGD)
    momentum = study_of(law(3e6, 1000, POWERS), "momentum", config=MOMENTUM)
    rows = judge([momentum, sgd], {name: f"make {name}" for name in ("sgd", "momentum")})
    assert {row.claim for row in rows} == set(CLAIMS)
    by_rule = {c.judge: [row for row in rows if row.claim is c] for c in CLAIMS}
    assert [row.studies for row in by_rule[linear_scaling]] == [("momentum",), ("sgd",)]
    (both,) = by_rule[critical_of_momentum]
    assert (both.studies, both.command) == (("momentum", "sgd"), "make momentum && make sgd")
    (missing,) = by_rule[steps_of_sparse]
    assert (missing.studies, missing.measured, missing.verdict) == (
        (),
        "no study of it",
        UNDECIDABLE,
    )
    counted = {claim.judge: verdicts for claim, verdicts in overall(rows).items()}
    assert counted[linear_scaling] == {SEEN: ["momentum", "sgd"]}
    assert counted[critical_of_momentum] == {SEEN: ["momentum against sgd"]}
    assert counted[steps_of_sparse] == {UNDECIDABLE: []}
