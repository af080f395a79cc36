"""Storage: studies in an Optuna database. The database holds all results of a study.

Read in this order: `schema` (what is stored, by name), `header` (how a study is declared),
`trial_queue` and `cells` (how a worker claims a trial and stores its result), `read` (reads a study
back as a `StudyRecord`). `merge` joins studies of several machines. `migrate` converts studies of
a former format. `database` and `locks` open a database and lock it between processes.

This room imports `lit_dps.core` only. It is the only room that imports Optuna and SQLAlchemy.
"""
