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
            ["pruning.options.of: None is not"],
        ),
        (
            edited("study/grid", {"pruning.method": ["snip", "lottery"]}),
            ["pruning.method: 'lottery' is not allowed"],
        ),
        (
            edited(
                "model/init_args/network",
                {"class_path": "lit_dps.models.ResNet8", "init_args": {"in_channels": 1}},
            )
            | {"pruning": {"method": "snap"}},
            ["pruning.method: 'snap' is not allowed", "an unstructured method for ResNet8"],
        ),
        (
            edited("optim", {"delay": -1}),
            ["optim.delay: -1 is not allowed; a whole number of steps, 0 or more"],
        ),
        (edited("study/grid", {"optim.delay": [0, -2]}), ["optim.delay: -2 is not allowed"]),
        (
            edited("local", {"workers": 0}),
            ["local.workers: 0 is not allowed; a whole number of workers, 1 or more"],
        ),
        (edited("local", {"workers": 2, "steps": 0}), ["local.steps: 0 is not allowed"]),
        (edited("study/grid", {"local.steps": [1, 0]}), ["local.steps: 0 is not allowed"]),
        (
            edited("local", {"workers": 2}) | {"optim": {"delay": 2}},
            ["local.workers: 2 is not allowed"],
        ),
        (
            edited("study/grid", {"optim.dely": [0, 2]}),
            ["study.grid: 'optim.dely' is not allowed; optim.delay"],
        ),
        (
            edited("study/grid", {"pruning.seed": [0, 2]}),
            ["study.grid: 'pruning.seed' is not allowed; one of pruning."],
        ),
        (
            edited("study/grid", {"pruning.options.batch": [1, 5]}),
            ["pruning.options: {'batch': 1} is not allowed; what snip takes"],
        ),
        (
            edited("study/grid", {"pruning.options.batches": [0, 1]}),
            ["pruning.options.batches: 0 is not allowed"],
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
        (("--optim.delay", -1), "optim.delay: -1 is not allowed"),
        (("--local.workers", 0), "local.workers: 0 is not allowed"),
        (("--pruning.method", "lottery"), "pruning.method: 'lottery' is not allowed"),
        (
            ("--pruning.method", "shuffle", "--pruning.options", "{of: null}"),
            "pruning.options.of: None is not allowed",
        ),
    ],
    ids=lambda value: None,
)
def test_one_run_refuses_it_before_anything_is_created(tmp_path, call, option, said):
    done = call("fit", "--config", FAST, *option)
    assert done.code == 2 and done.err.splitlines()[-1].startswith(f"lit-dps: error: {said}")
    assert not list(tmp_path.iterdir())
