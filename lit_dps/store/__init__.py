"""The databases of a study: the truth in an Optuna storage, the view in MLflow. No other room imports their libraries.

`lit_dps.store.schema` says what is stored. Import the names below from here: each brings only the libraries that it
needs, so that nobody waits for MLflow who only reads a study.
"""

from importlib import import_module
from typing import Any

_NAMES = {
    "urls": "absolute check_place check_writable is_http is_postgresql scrubbed sqlite_file ui_command "
    "without_password",
    "schema": "AXES FORMAT FORMAT_ATTR IDENTITY MERGED_FROM OWNER POINT_ATTR RESULT_ATTR RUN_ON STATES UNREAD "
    "cell_study_name cells_of decode_result encode_result",
    "liveness": "Liveness describe_owner start_of",
    "locks": "ServerPeers peers storage_lock",
    "database": "open_storage storage_errors",
    "read": "UNPACKED_BYTES Elsewhere list_studies open_elsewhere read_study study_uid",
    "joining": "StudyChanged changed compare",
    "foreign": "ForeignStudy",
    "header": "attributes begin_run check_unchanged declare extend keep_noise_scale keep_step_timing seed_of_trials",
    "lost": "StudyLost refuse_lost",
    "others": "TAKE_OVER LeftToOthers claim_report take_over",
    "environments": "changed_environment check_environment keep_environment",
    "outcomes": "keep_outcomes",
    "sobol": "SobolSampler distributions sobol_point",
    "search": "sampler_of",
    "advice": "AdviceStore list_advice",
    "trials": "MAX_QUEUED Store",
    "merging": "Merged merge",
    "mlflow_client": "experiments open_experiment page_address",
    "trust": "foreign_modules is_own remember",
    "places": "Logged Place place",
    "tracker": "Tracker",
    "views": "CELLS CURVES view_key views_of",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    """A public name, from its module, which is imported now (PEP 562)."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
