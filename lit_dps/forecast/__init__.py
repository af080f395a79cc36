"""Forecast: how many steps, validations and seconds a study takes, before it runs.

Read in this order: `remaining` (what is still to run, and which finished trials an
expectation rests on), `step_times` (a short timing), `forecast` (both as text). Nothing is stored.
"""
