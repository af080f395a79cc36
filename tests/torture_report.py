"""The page that tells what a torture came to."""

from __future__ import annotations

import datetime
import os
import platform
import shlex
from collections.abc import Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.torture import Report

TEXT = """# Nothing is lost

{date}, {cores} cores, {system}, torch {torch}, optuna {optuna}:

```bash
python -m tests.torture {arguments}
```

| storage | kills | of these | trials cut short | lost | doubled | missing | identical tables | unexpected ends |
|---|---|---|---|---|---|---|---|---|
{rows}

`study` commands share a small study, in turn one of two workers and one of two ranks that train each trial together.
At random moments one of these processes, or a command with all of them, is killed, told to leave, or stopped for a
while; whatever ended is started again. At the end of each study every result that was ever seen in the database must
still be there as it was, every declared point must be there once, and the table must be the one of a study that was
never disturbed. `make torture` does it again.
"""


def page(reports: Sequence[Report], arguments: Sequence[str]) -> str:
    """The page as Markdown."""
    rows = [
        f"| {r.storage} | {r.kills.total()} | {', '.join(f'{n} {kind}' for kind, n in sorted(r.kills.items()))} | "
        f"{r.cut_short} | {r.lost} | {r.doubled} | {r.missing} | {r.identical} of {r.studies} | {len(r.unexpected)} |"
        for r in reports
    ]
    return TEXT.format(
        date=datetime.date.today().isoformat(),
        cores=len(os.sched_getaffinity(0)),
        system=platform.system(),
        torch=version("torch"),
        optuna=version("optuna"),
        arguments=shlex.join(arguments),
        rows="\n".join(rows),
    )
