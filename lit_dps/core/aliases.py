"""Former names of configuration keys and of methods: they work for one more release.

A command warns once for each former name that the user wrote.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from functools import cache

# Present names of configuration keys, by former name.
RENAMED_KEYS = {
    "study.slack": "study.race_factor",
    "study.run_on": "study.train_past_goal",
}
# Present names of methods of the user's module, by former name.
RENAMED_METHODS = {"wrongness": "per_example_error"}


@cache
def warn_of_former_name(former: str, present: str) -> None:
    """Warn of a former name, once in a command: workers and further ranks do not warn."""
    _warn(f"{former} is now {present}; the old name will be removed in the next release.")


@cache
def warn_of_idle_key(key: str) -> None:
    """Warn of a former key that has no effect, once in a command."""
    _warn(f"{key} has no effect; remove it. It will be refused in the next release.")


def _warn(line: str) -> None:
    if multiprocessing.parent_process() is None and os.environ.get("RANK", "0") == "0":
        print(f"lit-dps: warning: {line}", file=sys.stderr)


def present_engine(engine: str, lean: bool | None) -> str:
    """Return the present value of `study.engine`.

    Args:
        engine: Its former or present value.
        lean: The former key `study.lean`; None if it is left out, as in present configurations.
    """
    if lean is False:
        return "lightning"
    if lean and engine == "lightning":
        return "single"  # the former meaning of "lightning"
    # "sparse" is an engine of stored studies that was removed. It did not change results.
    return {"fused": "stacked", "sparse": "single"}.get(engine, engine)
