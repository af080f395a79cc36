"""Benchmarks: what a study costs on this machine, in ratios to a named baseline measured in the
same run.

The last three sections measure no time: they judge what advice predicts by public runs.

    python -m benchmarks [SECTION ...] [--quick]

A section is a module of this package with a TITLE, `measure(options)`, which returns the numbers as
a dataclass, and `show(found)`, which formats them as markdown; it may have `verify(found)`, which
raises AssertionError where two ways to the same result differ. To add one, write the module and
name it in `SECTIONS`.
"""

SECTIONS = (
    "startup",
    "protocol",
    "step",
    "workers",
    "claims",
    "checks",
    "fused",
    "stacked",
    "stack_setup",
    "module_stacks",
    "scaling",
    "analyze",
    "shown",
    "time_left",
    "allocator",
    "memory",
    "step_model",
    "advice",
)
