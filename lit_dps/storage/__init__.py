"""Storage: studies in an Optuna database. The database holds all results of a study.

Read in this order: `schema` (what is stored, by name), `header` (what a study intends to run),
`trial_queue` (hands out trials and stores their results), `read` (reads a study back as a
`StudyRecord`), `merge` (joins studies of several machines). `database` and `locks` open a database
in one process at a time.

This room imports `lit_dps.core` only. It is the only room that imports Optuna and SQLAlchemy.
"""
