"""`fit --of` builds the setup of a stored study again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lit_dps.cli import retrain
from lit_dps.core.search_space import Choices
from lit_dps.storage.read import open_elsewhere, read_study

SHARDS = Path(__file__).parents[3] / "docs" / "replication" / "studies"
DATABASE = SHARDS / "paper-mnist-momentum-levels.db.xz"


@pytest.mark.skipif(not DATABASE.exists(), reason="the database of the replication is missing")
def test_a_study_that_ran_with_the_removed_engine_is_rebuilt():
    with open_elsewhere(str(DATABASE), "sqlite:///none.db") as stored:
        record = read_study(stored.storage, "paper-mnist-momentum-levels")
    assert record.config["study"]["engine"] == "single"
    # A text that looks like a number remains a text.
    study = {**record.config["study"], "space": {"model.tag": {"choices": ["1e3", "a"]}}}
    record = replace(record, config={**record.config, "study": study})
    setup = retrain._rebuilt(record)
    assert setup.study.space == {"model.tag": Choices(["1e3", "a"])}
    assert setup.study.engine == "single"
    assert setup.study.trials == record.trials
