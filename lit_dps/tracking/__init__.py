"""MLflow: the view of a study. Optuna's storage holds the truth; whatever is missing here can be logged again."""

from lit_dps.tracking.experiments import experiments, open_experiment, page_address
from lit_dps.tracking.tracker import Tracker

__all__ = ["Tracker", "experiments", "open_experiment", "page_address"]
