"""Which batch size, how many devices, how long, at what cost: the thinking, from numbers that were
measured.

`advise` takes two tables; `answer`, below it, a law and a model of step times. Law, rates and
observations are those of `lit_dps.analysis`. No torch, no database.
"""

from lit_dps.advice.answer import Answer, Checks, answer
from lit_dps.advice.branch_law import Branched, Critical
from lit_dps.advice.from_tables import advise
from lit_dps.advice.next_probe import contenders, next_probe, probes
from lit_dps.advice.noise import expected_critical
from lit_dps.advice.one_run import OneRun, of_runs, of_trials
from lit_dps.advice.step_time import Link, StepTime, Timed, fit_step_time
from lit_dps.advice.text import render
