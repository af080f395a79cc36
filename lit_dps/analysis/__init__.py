"""Analysis: numbers from a `StudyRecord`. No torch, no database.

`lit_dps.analysis.analysis.Analysis` computes each table once, when it is first used. Read in this
order: `summary` (K* of each cell), `fit` and `scaling` (the law K* = c1 / B + c2 and its
intervals), `repeats`, `critical`, `theory`. This room imports `lit_dps.core` only; `lit_dps.report`
prints and draws what it computes.
"""
