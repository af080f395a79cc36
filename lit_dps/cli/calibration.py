"""calibration: what advice predicted of runs beside what became of them, from storage alone. Needs
no torch."""

from __future__ import annotations

from lit_dps.advice.calibration import calibrate
from lit_dps.cli.parser import PlainParser
from lit_dps.core.config import StorageConfig
from lit_dps.core.text import escape
from lit_dps.storage.advice_store import list_advice


def main(argv: list[str]) -> int:
    """Runs the verb; argv[0] is "calibration"."""
    parser = PlainParser(prog="lit-dps calibration", description=__doc__)
    parser.add_class_arguments(StorageConfig, "storage")
    config = parser.instantiate_classes(parser.parse_args(argv[1:]))
    advice = list_advice(config.storage.optuna_url)
    print(
        escape(calibrate({name: kept.get("outcomes", []) for name, kept in advice.items()})),
        end="",
    )
    return 0
