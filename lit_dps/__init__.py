"""lit_dps: how batch size and sparsity rule the number of steps that training a network takes.

study = lit_dps.load("quickstart")
study.cells, study.law, study.plot()
"""

from importlib import import_module

__version__ = "0.1.0"

# Public names by the module that has them. They are imported when they are first asked for: importing the package is
# instant, and reading a study needs no torch.
_PUBLIC = {
    "load": "lit_dps.api",
    "run": "lit_dps.api",
    "Cell": "lit_dps.trial",
    "Series": "lit_dps.trial",
    "Trial": "lit_dps.trial",
    "TrialResult": "lit_dps.trial",
    "Status": "lit_dps.trial",
    "Goal": "lit_dps.goal",
    "Choices": "lit_dps.space",
    "Range": "lit_dps.space",
    "StudyRecord": "lit_dps.record",
    "Analysis": "lit_dps.analysis",
    "Study": "lit_dps.analysis",
    "ImageClassifier": "lit_dps.module",
    "GoalErrorCallback": "lit_dps.training",
    "BranchCallback": "lit_dps.training",
    "NoiseScaleCallback": "lit_dps.training",
    "PruningCallback": "lit_dps.training",
    "SmoothnessCallback": "lit_dps.training",
}


def __getattr__(name: str) -> object:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(_PUBLIC[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
