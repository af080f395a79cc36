"""Preflight: what is checked of a study before anything is created.

Read in this order: `check` (all checks in their order), `keys` (values of keys), `plug_ins`
(conformance tests), `dry_run` (short trials at both ends of the grid), then what the dry run
checks: `batch_size_check`, `resume_check`, `idle_keys`.
"""
