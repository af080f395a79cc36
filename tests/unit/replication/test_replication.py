"""The pages of the replication, from made-up studies."""

import dataclasses

import optuna
import pytest

from lit_dps.analysis.analysis import Analysis
from lit_dps.core.goal import Goal
from lit_dps.core.paper_protocol import workload
from lit_dps.core.trial import STACKED, Cell
from lit_dps.replication.appendix import appendix_page, protocol_rows
from lit_dps.replication.page import replication_page
from lit_dps.replication.parts import Core, Image, Machine, Part, table
from lit_dps.report.text import table_and_law, theory_text
from lit_dps.storage.read import read_study
from tests.support.fake_study import law_study, result, theory_terms, write_study

MACHINE = Machine(2, "Some CPU", "2.15.0")
CONFIG = {
    "study": {"name": "fake", "workers": 4},
    "data": {"class_path": "lit_dps.data.MNIST"},
    "model": {
        "init_args": {"optimizer": "sgd", "network": {"class_path": "lit_dps.models.SimpleCNN"}}
    },
}


def part(name="mnist", images=(), **kw):
    storage = optuna.storages.InMemoryStorage()
    law_study(storage, name, laws={0.0: (4e4, 60), 0.9: (8e4, 120)}, config=CONFIG, **kw)
    record = read_study(storage, name)
    return Part(Analysis(record), f"lit-dps study --config {name}.yaml", images)


def page(*parts, comparisons=None, date="2020-02-02"):
    return appendix_page(parts, comparisons or {}, MACHINE, "lit-dps replicate", date)


def front(*parts, comparisons=None):
    return replication_page(parts, comparisons or {}, MACHINE, "lit-dps replicate", "2020-02-02")


def section(text, title):
    """What stands under a heading, up to the next."""
    return text.split(f"## {title}\n", 1)[1].split("\n## ", 1)[0]


def test_the_pages_read_as_they_did(golden):
    study = part("mnist")
    golden.check("replication/page.md", front(study))
    claims = section(page(study), "The paper's claims, on every study")
    golden.check("replication/claims.md", claims)


def cells_of(text, first):
    """Return the cells of the row of a table that begins with a cell."""
    (line,) = (line for line in text.splitlines() if line.startswith(f"| {first} |"))
    return line.strip("| ").split(" | ")


def test_how_it_was_made():
    # 64 trials a study of 2 s each but the infeasible ones of 1 s, on 4 workers
    first, second = part("first"), part("second")
    seconds = sum(r.seconds for results in first.study.record.results.values() for r in results)
    hours = seconds / 3600 * 100  # a hundred times as long, so that it shows
    slow = dataclasses.replace(
        first.study.record,
        results={
            cell: [dataclasses.replace(r, seconds=100 * r.seconds) for r in results]
            for cell, results in first.study.record.results.items()
        },
    )
    first = dataclasses.replace(first, study=Analysis(slow))
    made = section(page(first, second), "How it was made")
    assert "`lit-dps replicate`" in made
    assert all(fact in made for fact in ("2020-02-02", "2 cores of Some CPU", "2.15.0"))
    row = cells_of(made, "`first`")
    command = "`lit-dps study --config first.yaml`"
    hour_text = f"{hours / 4:.2f}"
    assert row == ["`first`", "digits", "128 of 128", "4", hour_text, hour_text, command]
    assert f" {1.01 * hours / 4:.2f} hours" in made
    kept = [
        r.seconds
        for c, rs in slow.results.items()
        if c.batch_size == 4
        for r in rs
        if r.trial.point < 5
    ]
    assert 0 < len(kept) == 5 * len(slow.sparsities)
    core = sum(kept) / 3600 / 4
    extended = dataclasses.replace(first, core=Core([4], 5, slow.sparsities))
    made = section(page(extended), "How it was made")
    assert cells_of(made, "`first`")[4:6] == [f"{core:.2f}", hour_text]
    assert made.count(f" {core:.2f} hours") == made.count(f" {hour_text} hours") == 1
    assert first.stacked == 0


def test_stacked_trials_have_no_hours_since_each_has_the_time_of_all():
    study = part("first")
    record = study.study.record
    cell = Cell(4, record.sparsities[0])
    stacked = [dataclasses.replace(r, flags={**r.flags, STACKED: 1}) for r in record.results[cell]]
    others = [r for c, results in record.results.items() if c != cell for r in results]
    mixed = dataclasses.replace(record, results={**record.results, cell: stacked})
    found = dataclasses.replace(study, study=Analysis(mixed))
    assert (
        found.hours == pytest.approx(sum(r.seconds for r in others) / 3600)
        and found.hours < study.hours
    )
    assert found.stacked == len(stacked)
    made = section(page(found, part("second")), "How it was made")
    assert f" {len(stacked)} of `first`." in made


def test_only_the_date_line_changes():
    parts = [part("first"), part("second")]
    one, other = page(*parts).splitlines(), page(*parts, date="2021-03-03").splitlines()
    changed = [line for line, then in zip(one, other, strict=True) if line != then]
    assert [line[:30] for line in changed] == ["This page was made 2020-02-02 "]


def test_the_protocol_stands_beside_the_papers():
    record = dataclasses.replace(
        part().study.record, goal=Goal(0.05, 8, 1600), goals=(0.2, 0.1), race_factor=2.0
    )
    assert protocol_rows(record) == [
        {"": "batch sizes", "this study": "4, 16, 64, 256", "the paper": "2, 4, ..., 16384"},
        {"": "sparsities", "this study": "0, 0.9", "the paper": "0, 0.5, 0.7, 0.9"},
        {"": "trials per cell", "this study": "16", "the paper": "100"},
        {"": "goal validation error", "this study": "0.05, 0.2, 0.1", "the paper": "0.02"},
        {"": "steps between validations", "this study": "8", "the paper": "16"},
        {"": "max_steps", "this study": "1,600", "the paper": "40,000"},
        {"": "trials stop at", "this study": "2 K* of their cell", "the paper": "max_steps"},
    ]
    assert workload(record) == ("MNIST", "SimpleCNN")
    other = dataclasses.replace(record, config={})
    assert {row["the paper"] for row in protocol_rows(other)[3:6]} == {"-"}
    assert workload(other) == ("digits",)
    assert record.space_text == "learning_rate [0.001, 10] log; momentum [0.5, 0.999] reverse_log"


def test_a_study_has_its_table_its_law_and_its_figures():
    shown = part(images=[Image("K* against B", "replication/mnist-scaling.png")])
    text = section(page(shown), "Study mnist")
    assert f"```\n{table_and_law(shown.study).rstrip()}\n" in text
    assert "![K* against B](replication/mnist-scaling.png)\n\n*K\\* against B*" in text
    assert "have finished" not in text


def test_times_of_several_machines_are_told_where_a_figure_has_them():
    shown = part()
    both = tuple(
        {"python": "3.11", "hardware": each} for each in ("Xeon, 2 cores", "EPYC, 2 cores")
    )
    record = dataclasses.replace(shown.study.record, environments=both)
    text = section(page(dataclasses.replace(shown, study=Analysis(record))), "Study mnist")
    assert (
        "note: trials ran on Xeon, 2 cores, on EPYC, 2 cores: what is the fastest here may only"
        in text
    )
    assert "trials ran on" not in page(part())


def test_comparisons_have_their_figures_and_those_without_are_left_out():
    text = page(part(), comparisons={"MNIST": [Image("rules", "a.png")], "CIFAR10": []})
    assert "![rules](a.png)" in section(text, "MNIST")
    assert "CIFAR10" not in text


def test_what_has_not_finished_is_told():
    cells = {Cell(b, 0.0): [result(Cell(b, 0.0), 0, 320)] for b in (8, 16)}
    storage = optuna.storages.InMemoryStorage()
    write_study(storage, cells, trials=3, space={})
    record = read_study(storage, "fake")
    unfinished = Part(Analysis(record), "make")
    assert (unfinished.finished, unfinished.declared) == (2, 6)
    text = page(unfinished)
    assert "**2 of 6 trials have finished**; all of this page is about those." in section(
        text, "Study fake"
    )
    assert "note: 4 of 6 trials have not finished (0 running or queued)" in text
    assert "| `fake` | digits | 2 of 6 | 2 | 0.00 |" in text


def test_claims_are_judged_and_repeated_by_verdict():
    # Perfect scaling over the paper's whole range: no diminishing returns, no plateau.
    batch_sizes = [2**i for i in range(1, 15)]
    cells = {
        Cell(b, 0.0): [result(Cell(b, 0.0), i, round(1e8 / b)) for i in range(6)]
        for b in batch_sizes
    }
    storage = optuna.storages.InMemoryStorage()
    write_study(storage, cells, space={})
    record = read_study(storage, "fake")
    text = page(Part(Analysis(record), "make fake"))
    claims = section(text, "The paper's claims, on every study")
    assert (
        "| steps fall in proportion to batch size where batches are small (Section 3.1, Figure 1) "
        "| fake | - | - |" in claims
    )
    assert (
        "| larger batches give diminishing returns (Section 3.1, Figure 1) | - | fake | - |"
        in claims
    )
    assert (
        "| momentum has a larger critical batch size than SGD (Section 3.1, Figure 2) | - | - | "
        "no study |" in claims
    )
    row = next(
        line
        for line in claims.splitlines()
        if line.startswith("| larger batches give diminishing returns | fake")
    )
    said = "S=0: examples at B=16384 over those at B=2: x1 [0.998, 1]"
    assert (
        row
        == f"| larger batches give diminishing returns | fake | K\\* B grows | {said} | not seen "
        "| `make fake` |"
    )

    disagrees = section(front(Part(Analysis(record), "make fake")), "Where it disagrees")
    assert (
        "- **larger batches give diminishing returns**: not seen. We have no explanation."
        in disagrees
    )
    assert "small" not in disagrees and "L rises" not in disagrees


def test_the_theory_of_each_study():
    cells = {Cell(8, s): [result(Cell(8, s), 0, 320, **theory_terms(320))] for s in (0.0, 0.9)}
    storage = optuna.storages.InMemoryStorage()
    write_study(storage, cells, space={})
    record = read_study(storage, "fake")
    measured = Part(Analysis(record), "make")
    text = section(page(measured, part("bare")), "Theory")
    assert f"`fake`:\n\n```\n{theory_text(measured.study).rstrip()}\n```\n" in text
    assert "`bare`: no terms were measured." in text


def test_a_markdown_table_keeps_its_cells_whole():
    rows = [{"K*": "a|b", "command": "`x * y`"}, {"K*": "*", "command": "-"}]
    assert table(rows) == "| K\\* | command |\n| --- | --- |\n| a\\|b | `x * y` |\n| \\* | - |\n"
    with pytest.raises(IndexError):
        table([])
