"""Study: runs a study from its configuration to its result, and resumes it.

The course of `lit-dps study`, with the file of each step:

1. `StudySetup` (`setup`) is the configuration as plain data. `identity` selects the part of it that
   decides results; a stored study with another identity is refused.
2. `run_study` (`run`) checks the study before anything is created: `preflight.check.check_study`
   checks its keys and its storage, trains short trials, and resumes one of them.
3. `declare_study` (`declare`) creates the study in the storage, or extends the stored one. Trials
   without a final result remain: new, failed, paused or interrupted ones. The same command
   therefore resumes a study.
4. `train_remaining` trains them in this process or in several ones (`workers`). A worker claims an
   `Attempt` from the `TrialQueue` of `lit_dps.storage`. The rules of the race, which stops or
   pauses attempts that cannot improve K*, are in `lit_dps.core.racing`. An engine of
   `lit_dps.engines` trains it; the worker stores its result. After a signal, workers stop at the
   next validation, and release their trials.
5. `run` passes each result to `progress` (at a terminal `display`), MLflow and `failures`.
6. `run` stores the trial of each K*, times steps without other programs (`quiet_timing`), and
   publishes the report.

`environment`, `sources` and `data_hashes` record code, data and machine of a trial. `probe_run` has
the short runs beside a study that time or check something: `noise`, `quiet_timing`.
`retrain` and `expand_space` are what further commands do with a study.

`lit_dps.study(module, data, ...)` calls `lit_dps.api.study`: the package has the name of a public
function.
"""

import sys
from importlib import import_module
from inspect import Signature, signature
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    """A package that can be called: Python sets `lit_dps.study` to it at its first import."""

    @property
    def __doc__(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        # `help` shows the function, and then the modules of the package.
        function = import_module("lit_dps.api").study
        first, _, rest = str(function.__doc__).partition("\n")
        return f"{first}\n\n    lit_dps.study{signature(function)}\n{rest}"

    @property
    def __signature__(self) -> Signature:
        return signature(import_module("lit_dps.api").study)

    def __call__(self, *args: Any, **options: Any) -> Any:
        return import_module("lit_dps.api").study(*args, **options)


sys.modules[__name__].__class__ = _CallablePackage
