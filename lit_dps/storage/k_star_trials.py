"""The K* of a study's cells as trials of its header, for whoever opens the study in Optuna's plots
or dashboard.

They are a view: nothing reads them back. Optuna's finished trials cannot be changed, so a cell
whose K* changed, by more trials or a wider box, gets another one; its last holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, FloatDistribution, IntDistribution

from lit_dps.core.trial import Cell, Trial
from lit_dps.storage.cells import name_value
from lit_dps.storage.database import storage_errors, storage_for_now
from lit_dps.storage.locks import storage_lock
from lit_dps.storage.schema import BEST_ATTR, BEST_POINT, CELL_ATTR

K_STAR = "K*"


def keep_outcomes(url: str, name: str, found: Iterable[tuple[Trial, int]]) -> None:
    """Adds what is new of the cells' best trials and their K*, in steps, to the header.
    StorageError if it cannot be.

    A trial's parameters are the numbers among its cell's axes, batch_size and sparsity first; the
    cell by name, its best point and that point's metaparameters are user attributes.
    """
    with storage_errors(url), storage_for_now(url) as storage, storage_lock(url):
        header = optuna.load_study(study_name=name, storage=storage)
        name_value(header, K_STAR)
        last_of = {
            trial.user_attrs.get(CELL_ATTR): trial for trial in header.get_trials(deepcopy=False)
        }
        for best, k_star in found:
            attrs = {
                CELL_ATTR: str(best.cell),
                BEST_POINT: best.point,
                BEST_ATTR: dict(best.params),
            }
            last = last_of.get(attrs[CELL_ATTR])
            if last is None or (last.value, last.user_attrs) != (k_star, attrs):
                header.add_trial(_trial(best.cell, k_star, attrs))


def _trial(cell: Cell, k_star: int, attrs: Mapping[str, Any]) -> optuna.trial.FrozenTrial:
    others = {key: float(value) for key, value in cell.axes if type(value) in (int, float)}
    params = {"batch_size": cell.batch_size, "sparsity": cell.sparsity, **others}
    # Of one kind for all trials of a parameter, as Optuna asks; the ends of a range may differ.
    boxes: dict[str, BaseDistribution] = {
        key: FloatDistribution(value, value) for key, value in others.items()
    }
    boxes |= {
        "batch_size": IntDistribution(1, max(1 << 20, cell.batch_size), log=True),
        "sparsity": FloatDistribution(0, 1),
    }
    return optuna.create_trial(
        params=params, distributions=boxes, value=k_star, user_attrs=dict(attrs)
    )
