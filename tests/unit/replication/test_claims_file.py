"""The claims are data: a new claim on an existing quantity is an entry of a file."""

import dataclasses

import pytest
import yaml

from lit_dps import ConfigError
from lit_dps.analysis.analysis import Analysis
from lit_dps.replication.claims import (
    CLAIMS_FILE,
    QUANTITIES,
    judge_claims,
    load_claims,
    paper_claims,
)
from lit_dps.replication.page import FIGURES, headlines
from lit_dps.replication.parts import Part
from lit_dps.replication.rules import ClaimRange, Verdict
from tests.unit.replication.test_claims import POWERS, law, study_of

SEEN, NOT_SEEN, UNDECIDABLE = Verdict
ENTRY = {
    "id": "mild",
    "claim": "50 % sparse networks need at most twice the steps",
    "section": "3.1",
    "paper": "at most x2",
    "quantity": "sparse_steps_ratio",
    "arguments": {"sparsity": 0.5},
    "range": {"above": "1/2", "at_most": 2},
}


@pytest.fixture
def load(tmp_path):
    """Loads a file of claims with some entries, of which the first is changed."""

    def load(*others, **changed):
        entry = {key: value for key, value in {**ENTRY, **changed}.items() if value is not None}
        content = {
            "defaults": {"judged_on": ["*"], "sensitivity": ["*"]},
            "claims": [entry, *others],
        }
        file = tmp_path / "claims.yaml"
        file.write_text(yaml.safe_dump(content))
        return load_claims(file)

    return load


def test_a_claim_on_an_existing_quantity_needs_no_python(load):
    (claim,) = load()
    assert claim.range == ClaimRange(0.5, 2.0)
    for factor, verdict in ((1.0, SEEN), (8.0, NOT_SEEN)):
        steps = law(1e6, 1000, POWERS) | law(factor * 1e6, factor * 1000, POWERS, 0.5)
        study = study_of(steps)
        (judgement,) = judge_claims([study], {"fake": "make"}, [claim])
        assert (judgement.verdict, judgement.studies) == (verdict, ("fake",))
    assert claim.judge(study_of(law(1e6, 1000, POWERS))) is None, "no sparse series"


def test_a_claim_says_which_studies_may_carry_it_and_which_are_beside_it(load):
    steps = law(1e6, 1000, POWERS) | law(1.5e6, 1500, POWERS, 0.5)
    names = ("main-1", "other-1", "third")
    studies = [study_of(steps, name) for name in names]
    parts = [Part(study, "make") for study in studies]
    commands = dict.fromkeys(names, "make")
    (claim,) = load(judged_on=["main-*"], sensitivity=["other-*"])
    judgements = judge_claims(studies, commands, [claim])
    assert [judgement.studies for judgement in judgements] == [("main-1",), ("other-1",)]
    assert headlines(judgements, parts)[claim].studies == ("main-1",)
    (claim,) = load(judged_on=["other-1", "main-*", "*"])
    judgements = judge_claims(studies, commands, [claim])
    # The first name that a study has carries the verdict.
    assert headlines(judgements, parts)[claim].studies == ("other-1",)
    (claim,) = load(judged_on=["main-*"], sensitivity=["other-*"])
    judgements = judge_claims(studies[1:], commands, [claim])
    assert [judgement.studies for judgement in judgements] == [("other-1",), ()]
    assert headlines(judgements, parts)[claim].verdict is UNDECIDABLE


def test_a_study_of_k_star_in_seconds_is_not_judged(load):
    study = study_of(law(1e6, 1000, POWERS), "main-1")
    (claim,) = load(judged_on=["main-*"])
    goal = dataclasses.replace(study.record.goal, unit="seconds")
    in_seconds = Analysis(dataclasses.replace(study.record, goal=goal))
    assert claim.takes(study) and not claim.takes(in_seconds)


@pytest.mark.parametrize(
    ("changed", "key"),
    [
        ({"quantity": "magic"}, "claims.mild.quantity"),
        ({"arguments": {"sparse": 0.5}}, "claims.mild.arguments"),
        ({"colour": "red"}, "claims"),
        ({"paper": None}, "claims"),
        ({"range": None}, "claims"),
        ({"range": {"below": 1}}, "claims"),
        ({"range_set": "later"}, "claims.mild.range_set"),
    ],
)
def test_an_entry_that_is_wrong_is_refused_by_its_key(load, changed, key):
    with pytest.raises(ConfigError) as error:
        load(**changed)
    assert error.value.key == key


def test_ids_are_unique(load):
    with pytest.raises(ConfigError) as error:
        load(ENTRY)
    assert (error.value.key, error.value.value) == ("claims.id", "mild")


def test_the_file_of_the_paper_has_a_claim_on_each_quantity():
    assert {claim.quantity for claim in paper_claims()} == set(QUANTITIES)
    assert len(paper_claims()) == 21
    assert {claim.figure for claim in paper_claims()} <= {"", *FIGURES}
    comments = CLAIMS_FILE.read_text().split("\ndefaults:")[0]
    for entry in yaml.safe_load(CLAIMS_FILE.read_text())["claims"]:
        for key in entry:
            assert f"\n# {key} " in comments, f"{key} is not explained"
