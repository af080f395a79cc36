"""Preflight: what is checked of a study before anything is created.

Read in this order: `check` (all checks in their order), `keys` (values of keys), `plug_ins`
(conformance tests), `dry_run` (trials at both ends of the grid, run by `short_trial`, and one with
each value of an axis, listed by `varied_trials`), then what the dry run checks:
`batch_size_check`, `parts_check`, `resume_check`, `idle_keys`.
"""
