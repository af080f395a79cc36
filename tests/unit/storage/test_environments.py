"""What trials were made of is stored once, kept by merges, compared before a study is extended, and
noted."""

from __future__ import annotations

import pytest

from lit_dps.analysis.analysis import Analysis
from lit_dps.core.attempt import AttemptRules
from lit_dps.core.config import StudyConfig
from lit_dps.core.environment import DATA, KEY, SOURCES, THREADS, UNKNOWN, with_key
from lit_dps.core.goal import Goal
from lit_dps.core.search_space import Range
from lit_dps.core.trial import Cell, Status, TrialResult
from lit_dps.report.notes import lines_of
from lit_dps.report.trial_notes import ENVIRONMENTS
from lit_dps.storage.database import open_storage
from lit_dps.storage.header import StudyChanged, check_unchanged, declare
from lit_dps.storage.merge import merge
from lit_dps.storage.read import open_elsewhere, read_study
from lit_dps.storage.run_records import check_environment, store_environment
from lit_dps.storage.samplers import SobolSampler
from lit_dps.storage.stored_format import study_attributes
from lit_dps.storage.trial_queue import TrialQueue
from tests.support.runs import trials_of

SPACE = {"model.learning_rate": Range(1e-3, 1.0, "log")}
CELL, GOAL = Cell(4, 0.5), Goal(0.1, 16, 9600)


def environment(code: str = "1", since: str = "2026-11-27 10:00", **more) -> dict:
    plain = {
        "version.torch": "2.15",
        THREADS: 1,
        SOURCES: {"my_code.py": [code]},
        DATA: {"": ["1", "2", "3"]},
    }
    return with_key(plain | more, since)


@pytest.fixture
def study(tmp_path):
    """Runs trials of a study, each run in the environment that is given, and reads the study."""
    url, points = f"sqlite:///{tmp_path}/study.db", 0

    def run(made_of: dict | None, trials: int = 1, engine: str = "single", name: str = url):
        nonlocal points
        points += trials
        config = StudyConfig(
            name="s",
            batch_sizes=[4],
            sparsities=[0.5],
            trials=points,
            space=SPACE,
            race_factor=None,
        )
        _, uid = declare(name, config, "digits", GOAL, {}, {})
        if made_of is not None:
            store_environment(name, "s", made_of)
        key = None if made_of is None else made_of[KEY]
        worker = TrialQueue(
            name,
            "s",
            [CELL],
            points,
            SobolSampler(SPACE, 0),
            0,
            AttemptRules(GOAL),
            uid=uid,
            environment=key,
        )
        for trial in trials_of(worker):
            curve = {"step": [16], "val_error": [0.0], "train_loss": [1.0]}
            worker.store_result(TrialResult(trial, Status.COMPLETE, 16, curve, engine=engine))
        return read_study(name, "s")

    run.url = url
    return run


def test_an_environment_is_stored_once_and_trials_refer_to_it(study):
    study(environment(), 2)
    record = study(environment(since="2026-11-28 10:00"), 2)
    assert list(record.environments) == [environment()], "the first time stays"
    assert [r.environment for r in record.results[CELL]] == [environment()[KEY]] * 4
    assert [r.engine for r in record.results[CELL]] == ["single"] * 4
    assert lines_of(ENVIRONMENTS, Analysis(record)) == []


def test_other_code_or_data_is_refused_and_named(study):
    study(environment())
    check_environment(study.url, "s", environment())
    check_environment(study.url, "s", environment(threads=2, **{"version.torch": "2.16"}))
    for made_of, parts in [
        (environment("2"), ("my_code.py",)),
        (environment(**{DATA: {"": ["1", "9", "3"]}}), ("the data",)),
        (environment("2", **{DATA: {"": ["9", "2", "3"]}}), ("my_code.py", "the data")),
    ]:
        with pytest.raises(StudyChanged) as caught:
            check_environment(study.url, "s", made_of)
        assert caught.value.parts == parts
        assert str(caught.value).count("\n") == 0 and "--accept-code-change" in str(caught.value)
    check_environment(study.url, "another", environment("2"))
    check_environment("sqlite:///nowhere.db", "s", environment("2"))


def test_two_versions_are_noted_with_their_trials(study, golden):
    study(environment(), 3)
    record = study(environment("2", since="2026-11-28 09:30"), 2)
    (note,) = lines_of(ENVIRONMENTS, Analysis(record))
    golden.check("storage/two-versions.txt", note + "\n")
    (
        check_environment(study.url, "s", environment()),
        check_environment(study.url, "s", environment("2")),
    )


def test_what_no_trial_ran_in_is_not_noted(study):
    study(environment(), 3)
    store_environment(study.url, "s", environment("2"))
    assert lines_of(ENVIRONMENTS, Analysis(read_study(study.url, "s"))) == []


def test_trials_of_an_earlier_version_go_on_and_are_noted(study):
    study(None, 2)
    check_environment(study.url, "s", environment())
    record = study(environment(), 1)
    (note,) = lines_of(ENVIRONMENTS, Analysis(record))
    assert "2 trials" in note and "2026-11-27 10:00" in note


def test_versions_of_torch_are_noted_if_trials_name_no_environment(study):
    study(None, 2)
    for version in ("2.15", "2.11"):
        store_environment(study.url, "s", environment(**{"version.torch": version}))
    record = read_study(study.url, "s")
    notes = lines_of(ENVIRONMENTS, Analysis(record))
    assert any("torch 2.15 and 2.11" in note for note in notes)


def test_versions_threads_loops_and_unknown_code_are_noted(study, golden):
    study(environment(**{"version.timm": "1.0", "version.mlflow": "3.17"}))
    other = {"version.timm": "1.1", "version.mlflow": "3.18", "version.torch": "2.16", THREADS: 2}
    record = study(environment(**other, **{SOURCES: {"__main__.Net": UNKNOWN}}), engine="lightning")
    notes = lines_of(ENVIRONMENTS, Analysis(record))
    versions, unknown, threads, loops = notes
    assert "torch" in versions and "timm" in versions and "study.threads" in threads
    assert "__main__.Net" in unknown and "single" in loops
    assert "mlflow" not in versions, "it changes no result"
    golden.check("storage/environments.txt", "\n".join(notes) + "\n")


def test_a_merge_keeps_what_trials_were_made_of(study, tmp_path):
    here = f"sqlite:///{tmp_path}/here.db"
    study(environment("2", since="2026-11-28 09:30"), 1, name=here)
    study(environment(), 1)
    with open_elsewhere(f"{tmp_path}/study.db", here) as other:
        merge(here, [other])
    record = read_study(here, "s")
    assert {r.environment for r in record.results[CELL]} == {
        environment()[KEY],
        environment("2")[KEY],
    }
    assert {each[KEY] for each in study_attributes(open_storage(here), "s")["environments"]} == {
        environment()[KEY],
        environment("2")[KEY],
    }
    assert "my_code.py" in lines_of(ENVIRONMENTS, Analysis(record))[0]


def test_a_new_value_of_an_axis_of_the_data_is_no_other_data(tmp_path):
    """The identity has the digest of the largest value alone."""
    url = f"sqlite:///{tmp_path}/study.db"
    config = StudyConfig(
        name="s",
        batch_sizes=[4],
        sparsities=[0.5],
        trials=1,
        space=SPACE,
        grid={"data.noise": [0.5]},
    )
    declare(url, config, "digits", GOAL, {"data_digest": "of 0.5"}, {})
    with pytest.raises(StudyChanged):
        check_unchanged(url, "s", {"data_digest": "of 8"})
    store_environment(url, "s", environment(**{DATA: {"noise=0.5": ["of 0.5"]}}))
    check_unchanged(url, "s", {"data_digest": "of 8"})
    with pytest.raises(StudyChanged) as caught:
        check_environment(
            url, "s", environment(**{DATA: {"noise=0.5": ["edited"], "noise=8.0": ["of 8"]}})
        )
    (part,) = caught.value.parts
    assert part.endswith(" noise=0.5")
