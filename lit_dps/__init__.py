"""lit_dps: how batch size and sparsity rule the number of steps that training a network takes.

study = lit_dps.load("quickstart")
study.cells, study.law, study.plot()
"""

from importlib import import_module

__version__ = "0.1.0"

# Public names by the module that has them. They are imported when they are first asked for:
# importing the package is instant, and reading a study needs no torch.
_PUBLIC = {
    "load": "lit_dps.api",
    "run": "lit_dps.api",
    "Cell": "lit_dps.core.trial",
    "Series": "lit_dps.core.trial",
    "Trial": "lit_dps.core.trial",
    "TrialResult": "lit_dps.core.trial",
    "Status": "lit_dps.core.trial",
    "Goal": "lit_dps.core.goal",
    "Choices": "lit_dps.core.search_space",
    "Range": "lit_dps.core.search_space",
    "StudyRecord": "lit_dps.core.record",
    "Analysis": "lit_dps.analysis.analysis",
    "Study": "lit_dps.report.notebook",
    "ImageClassifier": "lit_dps.module",
    "GoalErrorCallback": "lit_dps.training",
    "BranchCallback": "lit_dps.readings",
    "NoiseScaleCallback": "lit_dps.readings",
    "PruningCallback": "lit_dps.training",
    "SmoothnessCallback": "lit_dps.readings",
}


def __getattr__(name: str) -> object:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(_PUBLIC[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
