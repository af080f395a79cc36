"""The pages of the replication, from made-up studies."""

import dataclasses
import re

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
from tests.support.claims import CLAIMS
from tests.support.fake_study import law_study, result, theory_terms, write_study
from tests.support.texts import numbers_in

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


def rows_of(text):
    """Return the rows of the tables of a text, each as the list of its cells."""
    return [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]


def claim_row(text, claim_id):
    """Return the row of a table of claims that is about a claim."""
    claim = CLAIMS[claim_id].claim
    rows = [row for row in rows_of(text) if re.sub(r"^\d+\. ", "", row[0]).startswith(claim)]
    (row,) = rows
    return row


def notes_of(text):
    return [line for line in text.splitlines() if line.startswith("note: ")]


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
    assert all(fact in made for fact in ("2020-02-02", "Some CPU", "2.15.0"))
    row = cells_of(made, "`first`")
    command = "`lit-dps study --config first.yaml`"
    hour_text = f"{hours / 4:.2f}"
    assert [row[0], row[1], row[3]] == ["`first`", "digits", "4"]
    assert numbers_in(row[2]) == [128, 128]
    assert row[4:] == [hour_text, hour_text, command]
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


def test_a_trial_of_a_study_and_its_subset_counts_once_in_the_sum_of_hours():
    """The subset has half of the batch sizes, and each trial other seconds."""
    study = part("first")
    timed = {}
    seconds = 0.0
    for cell, runs in study.study.record.results.items():
        timed[cell] = []
        for run in runs:
            run_seconds = 500 + len(timed) + run.trial.point / 100
            seconds += run_seconds
            timed[cell].append(dataclasses.replace(run, seconds=run_seconds))
    record = dataclasses.replace(study.study.record, results=timed)
    half = record.subset(record.sparsities, record.batch_sizes[::2])
    whole = dataclasses.replace(study, study=Analysis(record))
    subset = dataclasses.replace(
        study, study=Analysis(dataclasses.replace(half, name="first-sparse")), is_subset=True
    )
    made = section(page(whole, subset), "How it was made")
    assert float(cells_of(made, "`first-sparse`")[5]) > 0
    total = f"{seconds / 3600 / 4:.2f} hours"
    assert f"took {total} as configured and {total} as the commands" in made


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
    assert len(changed) == 1 and "2020-02-02" in changed[0]


def test_the_protocol_stands_beside_the_papers(golden):
    record = dataclasses.replace(
        part().study.record, goal=Goal(0.05, 8, 1600), goals=(0.2, 0.1), race_factor=2.0
    )
    protocol = table(protocol_rows(record))
    golden.check("replication/protocol.md", f"{protocol}\n{record.space_text}\n")
    assert workload(record) == ("MNIST", "SimpleCNN")
    other = dataclasses.replace(record, config={})
    assert {row["the paper"] for row in protocol_rows(other)[3:6]} == {"-"}
    assert workload(other) == ("digits",)


def test_a_study_has_its_table_its_law_and_its_figures():
    shown = part(images=[Image("K*(B)", "replication/mnist-scaling.png")])
    text = section(page(shown), "Study mnist")
    assert f"```\n{table_and_law(shown.study).rstrip()}\n" in text
    assert "![K*(B)](replication/mnist-scaling.png)\n\n*K\\*(B)*" in text
    assert "finished" not in text


def test_a_note_lists_the_machines_if_there_are_several():
    shown = part()
    machines = ("Xeon, 2 cores", "EPYC, 2 cores")
    both = tuple({"python": "3.11", "hardware": machine} for machine in machines)
    record = dataclasses.replace(shown.study.record, environments=both)
    text = section(page(dataclasses.replace(shown, study=Analysis(record))), "Study mnist")
    (note,) = [note for note in notes_of(text) if note not in notes_of(page(part()))]
    assert all(machine in note for machine in machines)
    assert not any(machine in page(part()) for machine in machines)


def test_comparisons_have_their_figures_and_those_without_are_left_out():
    text = page(part(), comparisons={"MNIST": [Image("rules", "a.png")], "CIFAR10": []})
    assert "![rules](a.png)" in section(text, "MNIST")
    assert "CIFAR10" not in text


def test_an_unfinished_study_is_marked():
    cells = {Cell(b, 0.0): [result(Cell(b, 0.0), 0, 320)] for b in (8, 16)}
    storage = optuna.storages.InMemoryStorage()
    write_study(storage, cells, trials=3, space={})
    record = read_study(storage, "fake")
    unfinished = Part(Analysis(record), "make")
    assert (unfinished.finished, unfinished.declared) == (2, 6)
    text = page(unfinished)
    (marked,) = re.findall(r"\*\*(.*)\*\*", section(text, "Study fake"))
    assert numbers_in(marked) == [2, 6]
    assert [4, 6, 0] in [numbers_in(note) for note in notes_of(text)]
    study, data, finished, workers, hours = cells_of(text, "`fake`")[:5]
    assert (study, data, workers, hours) == ("`fake`", "digits", "2", "0.00")
    assert numbers_in(finished) == [2, 6]


def test_claims_are_judged_and_repeated_by_verdict(golden):
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
    # The first table has the studies by verdict, the second has a row for each.
    verdicts, judgements = claims.split("\n\n| claim | study |")
    seen, not_seen, undecided = claim_row(verdicts, "linear-scaling")[1:]
    assert (seen, not_seen, undecided) == ("fake", "-", "-")
    assert claim_row(verdicts, "diminishing-returns")[1:] == ["-", "fake", "-"]
    seen, not_seen, undecided = claim_row(verdicts, "critical-of-momentum")[1:]
    assert (seen, not_seen) == ("-", "-") and undecided != "fake"
    row = claim_row(judgements, "diminishing-returns")
    assert (row[1], row[4], row[5]) == ("fake", "not seen", "`make fake`")
    assert "S=0" in row[3] and row[3].endswith("x1 [0.998, 1]")
    golden.check("replication/perfect-scaling.md", claims)

    disagrees = section(front(Part(Analysis(record), "make fake")), "Where it disagrees")
    assert f"- **{CLAIMS['diminishing-returns'].claim}**: not seen." in disagrees
    for claim in ("linear-scaling", "lipschitz-rises"):
        assert CLAIMS[claim].claim not in disagrees


def test_the_theory_of_each_study():
    cells = {Cell(8, s): [result(Cell(8, s), 0, 320, **theory_terms(320))] for s in (0.0, 0.9)}
    storage = optuna.storages.InMemoryStorage()
    write_study(storage, cells, space={})
    record = read_study(storage, "fake")
    measured = Part(Analysis(record), "make")
    text = section(page(measured, part("bare")), "Theory")
    assert f"`fake`:\n\n```\n{theory_text(measured.study).rstrip()}\n```\n" in text
    (line,) = [line for line in text.splitlines() if line.startswith("`bare`")]
    assert "terms" in line


def test_a_markdown_table_keeps_its_cells_whole():
    rows = [{"K*": "a|b", "command": "`x * y`"}, {"K*": "*", "command": "-"}]
    head, line, first, second = table(rows).splitlines()
    assert rows_of(head) == [["K\\*", "command"]] and set(line) == set("|- ")
    assert rows_of(f"{first}\n{second}") == [["a\\|b", "`x * y`"], ["\\*", "-"]]
    with pytest.raises(IndexError):
        table([])
