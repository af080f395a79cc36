"""lit_dps measures how batch size and sparsity change the number of steps that training takes.

study = lit_dps.load("quickstart")
study.cells, study.law, study.plot()
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the names of `_PUBLIC`, for type checkers and editors
    from lit_dps.advice.result import Advice as Advice
    from lit_dps.analysis.analysis import Analysis as Analysis
    from lit_dps.api import advise as advise
    from lit_dps.api import load as load
    from lit_dps.api import run as run
    from lit_dps.api import study as study
    from lit_dps.core.config import StorageConfig as StorageConfig
    from lit_dps.core.config import StudyConfig as StudyConfig
    from lit_dps.core.errors import ConfigError as ConfigError
    from lit_dps.core.goal import Goal as Goal
    from lit_dps.core.record import StudyRecord as StudyRecord
    from lit_dps.core.search_space import Choices as Choices
    from lit_dps.core.search_space import Range as Range
    from lit_dps.core.trial import Cell as Cell
    from lit_dps.core.trial import Series as Series
    from lit_dps.core.trial import Status as Status
    from lit_dps.core.trial import Trial as Trial
    from lit_dps.core.trial import TrialResult as TrialResult
    from lit_dps.core.trial_config import GoalConfig as GoalConfig
    from lit_dps.core.trial_config import OptimConfig as OptimConfig
    from lit_dps.core.trial_config import PruningConfig as PruningConfig
    from lit_dps.module import ImageClassifier as ImageClassifier
    from lit_dps.readings import BranchCallback as BranchCallback
    from lit_dps.readings import NoiseScaleCallback as NoiseScaleCallback
    from lit_dps.readings import ReadingsCallback as ReadingsCallback
    from lit_dps.report.document import CellEntry as CellEntry
    from lit_dps.report.document import Document as Document
    from lit_dps.report.document import LawEntry as LawEntry
    from lit_dps.report.notebook import Study as Study
    from lit_dps.training import GoalErrorCallback as GoalErrorCallback
    from lit_dps.training import PruningCallback as PruningCallback

__version__ = "0.1.0"

# Public name -> its module. A name is imported when it is first used. So importing the package is
# instant, and reading a study needs no torch.
_PUBLIC = {
    "load": "lit_dps.api",
    "run": "lit_dps.api",
    "study": "lit_dps.api",
    "advise": "lit_dps.api",
    "Cell": "lit_dps.core.trial",
    "Series": "lit_dps.core.trial",
    "Trial": "lit_dps.core.trial",
    "TrialResult": "lit_dps.core.trial",
    "Status": "lit_dps.core.trial",
    "Goal": "lit_dps.core.goal",
    "Choices": "lit_dps.core.search_space",
    "Range": "lit_dps.core.search_space",
    "StudyRecord": "lit_dps.core.record",
    "ConfigError": "lit_dps.core.errors",
    "StudyConfig": "lit_dps.core.config",
    "GoalConfig": "lit_dps.core.trial_config",
    "PruningConfig": "lit_dps.core.trial_config",
    "OptimConfig": "lit_dps.core.trial_config",
    "StorageConfig": "lit_dps.core.config",
    "Advice": "lit_dps.advice.result",
    "Analysis": "lit_dps.analysis.analysis",
    "Study": "lit_dps.report.notebook",
    "Document": "lit_dps.report.document",
    "CellEntry": "lit_dps.report.document",
    "LawEntry": "lit_dps.report.document",
    "ImageClassifier": "lit_dps.module",
    "GoalErrorCallback": "lit_dps.training",
    "BranchCallback": "lit_dps.readings",
    "NoiseScaleCallback": "lit_dps.readings",
    "PruningCallback": "lit_dps.training",
    "ReadingsCallback": "lit_dps.readings",
}


def __getattr__(name: str) -> object:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "study":  # the package of this name can be called, and always is the attribute
        return import_module("lit_dps.study")
    value = getattr(import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
