"""The former place of `lit_dps.advice.prediction`: class paths in users' files keep working."""

from lit_dps.advice.prediction import PredictionCallback

__all__ = ["PredictionCallback"]
