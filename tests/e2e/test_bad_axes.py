"""Bad masks, delays and rounds, of a section or an axis of the grid: one line, exit code 2, nothing
created."""

from __future__ import annotations

import pytest

from tests.e2e.commands import FAST
from tests.e2e.test_bad_input import edited, refusal  # noqa: F401


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            edited("pruning", {"method": "shuffle", "options": {"of": None}}),
            ["pruning.options.of is null"],
        ),
        (
            edited("study/grid", {"pruning.method": ["snip", "lottery"]}),
            ["pruning.method is 'lottery'"],
        ),
        (
            edited(
                "model/init_args/network",
                {"class_path": "lit_dps.models.ResNet8", "init_args": {"in_channels": 1}},
            )
            | {"pruning": {"method": "snap"}},
            ["pruning.method is 'snap'", "an unstructured method for ResNet8"],
        ),
        (
            edited("optim", {"delay": -1}),
            ["optim.delay is -1; it must be a whole number of steps, 0 or more"],
        ),
        (edited("study/grid", {"optim.delay": [0, -2]}), ["optim.delay is -2"]),
        (
            edited("local", {"workers": 0}),
            ["local.workers is 0; it must be a whole number of workers, 1 or more"],
        ),
        (edited("local", {"workers": 2, "steps": 0}), ["local.steps is 0"]),
        (
            edited("study/grid", {"local.workers": [1, 2], "local.steps": [1, 0]}),
            ["local.steps is 0"],
        ),
        (
            edited("study/grid", {"local.steps": [1, 4]}),
            ["study.grid is 'local.steps'; it must be another key"],
        ),
        (
            edited("local", {"workers": 2}) | {"optim": {"delay": 2}},
            ["local.workers is 2"],
        ),
        (
            edited("study/grid", {"optim.dely": [0, 2]}),
            ["study.grid is 'optim.dely'; it must be one of optim.delay, optim.average_half_life"],
        ),
        (
            edited("study/grid", {"pruning.seed": [0, 2]}),
            ["study.grid is 'pruning.seed'; it must be one of pruning."],
        ),
        (
            edited("study/grid", {"pruning.options.batch": [1, 5]}),
            [
                "pruning.options.batch is 1; ",
                "Did you mean batches?",
            ],
        ),
        (
            edited("study/grid", {"pruning.options.batches": [0, 1]}),
            ["pruning.options.batches is 0"],
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bad_axis(refusal, config, said):  # noqa: F811
    message = refusal(config=config)
    for part in said:
        assert part in message


@pytest.mark.parametrize(
    ("option", "said"),
    [
        (("--optim.delay", -1), "optim.delay is -1"),
        (("--local.workers", 0), "local.workers is 0"),
        (("--pruning.method", "lottery"), "pruning.method is 'lottery'"),
        (
            ("--pruning.method", "shuffle", "--pruning.options", "{of: null}"),
            "pruning.options.of is null",
        ),
    ],
    ids=lambda value: None,
)
def test_one_run_refuses_it_before_anything_is_created(tmp_path, call, option, said):
    done = call("fit", "--config", FAST, *option)
    assert done.code == 2 and done.err.splitlines()[-1].startswith(f"lit-dps: error: {said}")
    assert not list(tmp_path.iterdir())
