"""Advice: which batch size, how many devices, how long, at what cost.

The thinking needs numbers alone, no torch and no database; this package exports it. Read it in this
order:

1. `answer`: the table of times and costs, from a law, a model of the step time (`step_time`), and
   prices (`costs`).
2. `branch_law`: a law from critical batch sizes along one run.
3. `next_probe`: what a further run is worth. `text`: the answer as text.

`run` asks for a user's module: it times steps (`step_probe`), then trains the user's run and a
few others (`pilot_plan`, `pilot_run`, `pilot_course`, `probe_value`, `probe_study`,
`pilot_evidence`), or forks a run (`branch_run`). It reports the answer (`report`), with a
configuration (`recommendation`).
"""

from lit_dps.advice.answer import Answer, answer
from lit_dps.advice.branch_law import Branched, CriticalRange
from lit_dps.advice.costs import Checks, Costs
from lit_dps.advice.next_probe import law_with_prior, rank_probes
from lit_dps.advice.step_time import Link, StepTime, Timed, fit_step_time
from lit_dps.advice.text import render
