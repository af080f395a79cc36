"""Forecast: how many steps, validations and seconds a study takes, before it runs.

Read in this order: `remaining` (what is still to run, and which finished trials an
expectation rests on), `table` (the times), `forecast` (all of it as text). Nothing is run or
stored, except for a short timing.
"""
