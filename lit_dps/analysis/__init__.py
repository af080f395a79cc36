"""Analysis: numbers from a `StudyRecord`. No torch, no database.

`lit_dps.analysis.analysis.Analysis` is the index: it computes each table once, when it is first
used. Read in this order: `summary` (K* of each cell), `law_fit` and `law_bootstrap` (the law K* =
c1 / B + c2 and its intervals), `repeats`, `critical`, `answer` (time to the goal), with `law`,
`law_posterior` and `observations` (the same law with a posterior, for predictions), `rates`,
`theory`. This room imports `lit_dps.core` only; `lit_dps.report` prints and draws its results.
"""
