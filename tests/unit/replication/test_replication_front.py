"""The page of the replication: which study each claim and figure stands at, and how short it is."""

import dataclasses
import re
from typing import NamedTuple

import optuna
import pytest

from lit_dps.analysis.analysis import Analysis
from lit_dps.core.goal import Goal
from lit_dps.core.repeats import RepeatPlan
from lit_dps.core.trial import Cell, Status
from lit_dps.replication.claims import judge_claims
from lit_dps.replication.comparable import workload_and_goal
from lit_dps.replication.incomplete_cells import complete_subset, sparse_subset
from lit_dps.replication.page import headlines
from lit_dps.replication.parts import Core, Image, Part
from lit_dps.replication.rules import Verdict
from lit_dps.storage.read import read_study
from tests.support.claims import CLAIMS
from tests.support.fake_study import result, write_study
from tests.support.texts import numbers_in
from tests.unit.replication.test_claims_terms import PAPER, theory
from tests.unit.replication.test_replication import CONFIG, claim_row, front, part, rows_of, section


class Summary(NamedTuple):
    """The numbers of the first paragraph of the page."""

    studies: int
    trials: int
    repeats: int
    steps: int
    extent: list[float]


def summary_of(text):
    paragraph = text.partition("The evidence is ")[2].partition(" [The appendix]")[0]
    numbers = numbers_in(paragraph.replace(",", ""))
    return Summary(*map(int, numbers[:4]), numbers[4:])


def verdict_of(text, claim_id):
    """Return the study and the verdict of a claim in the table of claims."""
    return tuple(claim_row(text, claim_id)[-2:])


def decided_at_goal(text):
    """Return how many claims are decided at the paper's goal."""
    line = section(text, "In short").rstrip().splitlines()[-1]
    return int(numbers_in(line)[0])


def k_stars(name, factor, trials, speed=None, sizes=(2, 8, 32)):
    """A study of one series, all of whose trials need factor / B steps, and of equal `speed` equal
    seconds."""
    speed = speed or 1 + trials
    cells = {
        Cell(b, 0.0): [
            result(Cell(b, 0.0), i, round(factor / b), seconds=(i + 1) / speed)
            for i in range(trials)
        ]
        for b in sizes
    }
    storage = optuna.storages.InMemoryStorage()
    write_study(storage, cells, name, trials=trials, space={}, config=CONFIG)
    return Part(Analysis(read_study(storage, name)), f"make {name}")


def test_a_claim_that_names_no_study_of_the_page_stands_at_the_largest():
    small, large, undecided = (
        k_stars("small", 1e6, 5),
        k_stars("large", 1e6, 7),
        k_stars("few", 1e6, 2),
    )
    parts = [small, large, undecided]
    judgements = judge_claims(
        [part.study for part in parts], {part.study.record.name: part.command for part in parts}
    )
    at = {claim.id: judgement for claim, judgement in headlines(judgements, parts).items()}
    linear = at["linear-scaling"]
    assert (linear.where, linear.verdict) == ("large", "seen")
    text = front(*parts)
    assert verdict_of(text, "linear-scaling") == ("`large`", "seen; also by 1 other")
    nowhere = at["critical-of-momentum"]
    assert nowhere.where == "" and nowhere.verdict is Verdict.UNDECIDABLE
    assert decided_at_goal(text) == 0

    bends = {
        Cell(b, 0.0): [result(Cell(b, 0.0), i, k) for i in range(3)]
        for b, k in ((2, 5000), (8, 4000))
    }
    storage = optuna.storages.InMemoryStorage()
    write_study(
        storage, bends, "hard", trials=3, space={}, config=CONFIG, goal=Goal(0.02, 16, 40_000)
    )
    hard = Part(Analysis(read_study(storage, "hard")), "make hard")
    assert hard.scale > large.scale, "fewer trials, but at the paper's own goal"
    # It has more trials, but of a half-done study.
    assert dataclasses.replace(large, incomplete="S=0.9").scale < small.scale
    for asked, whole in (((2, 8), True), ((2, 8, 32, 128), False)):
        beyond = dataclasses.replace(large, incomplete="B = 128", core=Core(asked, 7, (0.0,)))
        assert (beyond.scale > small.scale) == whole, (
            "what is incomplete lies beyond its configuration"
        )
    deep = {
        cell: results * 5
        for cell, results in hard.study.record.results.items()
        if cell.batch_size == 2
    }
    deep = Part(
        Analysis(
            dataclasses.replace(hard.study.record, name="deep", batch_sizes=(2,), results=deep)
        ),
        "make",
    )
    of_goals = [
        dataclasses.replace(hard.study.record, goal=Goal(error, 16, 40_000))
        for error in (0.01, 0.02, 0.021)
    ]
    of_goals += [
        dataclasses.replace(hard.study.record, goal=Goal(0.01, 16, 40_000, metric="val_loss"))
    ]
    assert [Part(Analysis(record), "").scale.at_papers_goal for record in of_goals] == [
        True,
        True,
        False,
        False,
    ]
    nobody = {
        cell: [dataclasses.replace(r, status=Status.INCOMPLETE, steps=None) for r in results]
        for cell, results in hard.study.record.results.items()
    }
    missed = dataclasses.replace(hard.study.record, goal=Goal(0.01, 16, 40_000), results=nobody)
    assert not Part(Analysis(missed), "").scale.at_papers_goal, "harder, and met by nobody"
    text = front(*parts, hard)
    assert summary_of(text).extent == [3, 8, 100, 16384]
    assert summary_of(front(*parts, hard, deep)).extent == [3, 8, 15, 2, 100, 16384]
    # The one at the paper's goal carries the verdict, also if it does not decide.
    study, verdict = verdict_of(text, "linear-scaling")
    assert study == "`hard`" and verdict.startswith("undecided; seen by `small`, `large`")
    assert "; also by" in verdict_of(front(*parts), "linear-scaling")[1]
    assert decided_at_goal(text) == 0
    fine = dataclasses.replace(small.study.record, name="fine", goal=hard.study.record.goal)
    wide = {}
    for cell, results in hard.study.record.results.items():
        wide[cell] = [
            dataclasses.replace(r, trial=dataclasses.replace(r.trial, point=i))
            for i, r in enumerate(results * 20)
        ]
    wide = dataclasses.replace(hard.study.record, name="wide", trials=60, results=wide)
    text = front(*(Part(Analysis(record), "make") for record in (fine, wide)))
    # Both are of the paper's goal.
    assert verdict_of(text, "diminishing-returns") == ("`wide`", "seen")
    assert decided_at_goal(text) >= 1


def test_a_study_that_decides_otherwise_stands_beside_the_verdict():
    rises, falls = theory(**PAPER).record, theory(lipschitz=0.5, points=4).record
    parts = [
        Part(Analysis(dataclasses.replace(r, name=n)), "make")
        for n, r in (("rises", rises), ("falls", falls))
    ]
    study, verdict = verdict_of(front(*parts), "lipschitz-rises")
    assert study == "`rises`" and verdict.startswith("seen; ") and verdict.endswith(" `falls`")
    assert verdict_of(front(parts[0]), "lipschitz-rises") == ("`rises`", "seen")


def test_the_front_page_has_the_papers_figures_from_the_widest_study_and_is_short():
    shown = [Image("curve", f"{name}.png", "scaling") for name in ("small", "large")]
    small, large = k_stars("small", 1e6, 5), k_stars("large", 1e6, 7)
    small, large = (
        dataclasses.replace(p, images=[image])
        for p, image in zip((small, large), shown, strict=True)
    )
    theirs = {
        workload_and_goal(large.study.record): [
            Image("ratios", "ratios.png", "ratios", ("large", "momentum"))
        ],
        "other": [],
    }
    text = front(small, large, comparisons=theirs)
    assert "![curve](large.png)" in section(text, "Figure 1") and "small.png" not in text
    assert "![ratios](ratios.png)" in section(text, "Figure 12")
    assert "The figure shows `large`, `momentum`." in section(text, "Figure 12")
    assert section(text, "Figure 1").rstrip().endswith("The figure shows `large`.")
    assert "Figure 4" not in [line.removeprefix("## ") for line in text.splitlines()]
    summary = summary_of(text)
    assert (summary.studies, summary.trials) == (2, 36) and len(text.split()) < 2200
    further = k_stars("further", 1e6, 9, speed=8)
    summary = summary_of(front(small, large, further))
    # The 21 of the large one are taken over, and count once.
    assert (summary.studies, summary.trials) == (3, 42)
    critical = rows_of(section(text, "Critical batch sizes"))
    assert ["`large`", "S=0", *critical_of(large)] in critical
    deep = k_stars("deep", 1e6, 30, sizes=(2, 8))
    deep = dataclasses.replace(deep, images=[Image("curve", "deep.png", "scaling")])
    text = front(large, deep)
    # A claim is of the study with the most trials, a curve of that with the most batch sizes.
    assert deep.scale > large.scale
    assert verdict_of(text, "linear-scaling") == ("`deep`", "seen; also by 1 other")
    assert "![curve](large.png)" in text and "deep.png" not in text
    shown = section(text, "Figure 1").rstrip().splitlines()[-1]
    assert shown.startswith("The figure shows `large`. `deep`, which carries the verdict on claims")
    assert numbers_in(shown) == [1, 2, 3, 20]
    critical = rows_of(section(text, "Critical batch sizes"))
    assert ["`large`", "S=0"] in [row[:2] for row in critical]


def test_a_subset_is_no_study_of_its_own_and_a_name_is_no_mark():
    whole, other = part("grows"), part("grows-sparse")
    assert summary_of(front(whole, other)).studies == 2
    subset = dataclasses.replace(other, is_subset=True)
    assert summary_of(front(whole, subset)).studies == 1


def test_what_two_claims_rest_on_is_said_once():
    record = part("grows").study.record
    init = CONFIG["model"]["init_args"] | {"optimizer": "momentum"}
    record = dataclasses.replace(
        record, config=CONFIG | {"model": CONFIG["model"] | {"init_args": init}}
    )
    text = front(Part(Analysis(record), "make grows"))
    first = claim_row(text, "critical-no-earlier")
    second = claim_row(text, "critical-later-with-momentum")
    assert "B_crit" in first[2] and second[2] == "as above"
    # A claim that no study measures has no number.
    assert "as above" not in front(k_stars("dense", 1e6, 5))


def test_a_number_that_the_paper_does_not_have_is_a_disagreement_where_the_claim_is_seen():
    claim = f"- **{CLAIMS['variance-falls'].claim}**: "

    def disagreement(beta):
        """Return the line about the claim; None if there is no disagreement."""
        text = section(front(Part(theory(beta=beta), "make")), "Where it disagrees")
        return next((line for line in text.splitlines() if line.startswith(claim)), None)

    falls, rises = disagreement(0.3), disagreement(2.0)
    assert falls.startswith(f"{claim}seen; ") and rises.startswith(f"{claim}not seen; ")
    assert disagreement(0.54) is None


def test_the_region_of_success_is_drawn_of_a_study_that_is_not_raced():
    parts = []
    for name, trials, slack in (("raced", 7, 1.0), ("whole", 5, None)):
        study = k_stars(name, 1e6, trials).study
        images = [
            Image("shown", f"{name}-{kind}.png", kind) for kind in ("scaling", "metaparameters")
        ]
        parts.append(
            Part(Analysis(dataclasses.replace(study.record, race_factor=slack)), "make", images)
        )
    text = front(*parts)
    assert "raced-scaling.png" in section(
        text, "Figure 1"
    ) and "whole-metaparameters.png" in section(text, "Figure 3")


def critical_of(part):
    found = next(iter(part.study.critical_batch_sizes.values()))
    return [str(found[name]).replace("*", "\\*") for name in ("linear_20", "overhead", "law")]


def again(results):
    """The first repeat of the best of some trials, as long as it."""
    best = min((r for r in results if r.steps is not None), key=lambda r: (r.steps, r.trial.point))
    return [dataclasses.replace(best, trial=dataclasses.replace(best.trial, repeat=1))]


def test_a_cell_with_under_half_of_the_trials_is_incomplete():
    whole = k_stars("whole", 1e6, 8).study.record
    cell = Cell(32, 0.0)
    for kept, left in ((3, "B = 32"), (4, "")):
        begun = dataclasses.replace(
            whole, results={**whole.results, cell: whole.results[cell][:kept]}
        )
        assert complete_subset(begun)[1] == left


def test_a_batch_size_that_is_incomplete_is_left_out_where_that_keeps_more():
    whole = part("grows").study.record
    larger = 2 * whole.batch_sizes[-1]
    begun = {Cell(larger, s): [] for s in whole.sparsities}
    grown = dataclasses.replace(
        whole,
        batch_sizes=(*whole.batch_sizes, larger),
        results={
            **whole.results,
            **begun,
            Cell(larger, 0.0): whole.results[Cell(whole.batch_sizes[-1], 0.0)],
        },
        running={**whole.running, **dict.fromkeys(begun, 0)},
        repeats={**whole.repeats, **dict.fromkeys(begun, [])},
    )
    assert complete_subset(grown) == (whole, f"B = {larger}")
    only = Cell(whole.batch_sizes[0], 0.0)
    barely = dataclasses.replace(
        grown, results={c: r if c == only else [] for c, r in grown.results.items()}
    )
    record, left = complete_subset(barely)
    assert (record.sparsities, record.batch_sizes) == ((0.0,), (only.batch_size,))
    assert numbers_in(left) == [0, only.batch_size]
    assert record.results == {only: whole.results[only]}


def test_the_batch_sizes_that_are_complete_at_both_sparsities_are_a_second_part():
    """Seven batch sizes are complete at S = 0, and three of them at S = 0.9."""
    whole = part("grows").study.record
    dense, sparse = (whole.results[Cell(whole.batch_sizes[0], s)] for s in (0.0, 0.9))
    sizes = [2**i for i in range(7)]
    results = {Cell(size, 0.0): dense for size in sizes}
    results |= {Cell(size, 0.9): sparse if size in (2, 8, 32) else [] for size in sizes}
    counts = dict.fromkeys(results, 0)
    repeats = dict.fromkeys(results, [])
    grown = dataclasses.replace(
        whole, batch_sizes=tuple(sizes), results=results, running=counts, repeats=repeats
    )
    record, _ = complete_subset(grown)
    assert (record.sparsities, record.batch_sizes) == ((0.0,), tuple(sizes))
    record, left = sparse_subset(grown)
    assert (record.sparsities, record.batch_sizes) == ((0.0, 0.9), (2, 8, 32))
    assert record.name == f"{grown.name}-sparse"
    assert left == "B = 1, 4, 16, 64"
    assert sparse_subset(record) is None and sparse_subset(whole) is None
    results[Cell(8, 0.9)] = []
    assert sparse_subset(dataclasses.replace(grown, results=results)) is None


def seeds_of(text):
    """Return the numbers of seeds in the sentence about medians."""
    (sentence,) = re.findall(r"Medians [^.]*\.", " ".join(text.split()))
    return numbers_in(sentence)


@pytest.mark.parametrize(
    ("planned", "ran", "left"),
    [
        *(
            (20, (1, 2, 3, 4), ""),
            (20, (1, 2, 3), "B = 32"),
            (3, (1, 2), "B = 32"),
            (3, (1, 2, 3), ""),
        ),
        (
            20,
            (1, 2, 3, 4, 5, 7),
            "B = 32",
        ),  # the sixth was stopped, since it needs more steps than the seventh
    ],
)
def test_a_cell_with_repeats_for_a_median_is_not_incomplete(planned, ran, left):
    whole, cell = k_stars("whole", 1e6, 8).study.record, Cell(32, 0.0)

    def repeats(each, numbers):
        (one,) = again(whole.results[each])
        return [
            dataclasses.replace(one, trial=dataclasses.replace(one.trial, repeat=n))
            for n in numbers
        ]

    every = {
        each: repeats(each, ran if each == cell else range(1, planned + 1))
        for each in whole.results
    }
    grown = dataclasses.replace(whole, repeats=every, plan=RepeatPlan(planned, 1, None))
    assert complete_subset(grown)[1] == left
    seeds = [len(ran), planned] if len(ran) < planned else [planned]
    assert seeds_of(front(Part(Analysis(grown), "make"))) == seeds
    assert seeds_of(front(k_stars("bare", 1e6, 8))) == []


def test_a_sparsity_that_is_incomplete_is_left_out_and_reported():
    whole = part("grows").study.record
    begun = {Cell(b, 0.5): [] for b in whole.batch_sizes}
    begun[Cell(whole.batch_sizes[0], 0.5)] = whole.results[Cell(whole.batch_sizes[0], 0.0)]
    idle = dict.fromkeys(begun, 0)
    grown = dataclasses.replace(
        whole,
        sparsities=(0.0, 0.5, 0.9),
        results={**whole.results, **begun},
        running={**whole.running, **idle},
        repeats={**whole.repeats, **dict.fromkeys(begun, [])},
    )
    record, left = complete_subset(grown)
    assert left.split() == ["S", "=", "0.5"] and record == whole
    assert complete_subset(whole) == (whole, "")
    assert f"`grows` at {left}" in front(Part(Analysis(record), "make", incomplete=left))
    dense = dataclasses.replace(
        grown, results={c: r if c.sparsity < 0.5 else [] for c, r in grown.results.items()}
    )
    record, incomplete = complete_subset(dense)
    assert record.sparsities == (0.0,) and numbers_in(incomplete) == [0.5, 0.9]
    nothing = dataclasses.replace(grown, results={cell: [] for cell in grown.results})
    assert complete_subset(nothing) == (nothing, ""), "nothing is whole"
    filled = {
        **whole.results,
        **{Cell(b, 0.5): whole.results[Cell(b, 0.0)] for b in whole.batch_sizes},
    }
    ahead = dataclasses.replace(grown, results=filled)
    assert complete_subset(ahead) == (ahead, ""), "nothing was repeated anywhere"
    repeats = {cell: [] if cell.sparsity == 0.5 else again(found) for cell, found in filled.items()}
    behind = dataclasses.replace(ahead, repeats=repeats, plan=RepeatPlan(1, 1, None))
    # Its repeats are still to come.
    assert complete_subset(behind)[1] == left
    runs = sum(len(found) for found in repeats.values())
    seconds = sum(
        r.seconds for by_cell in (filled, repeats) for results in by_cell.values() for r in results
    )
    assert Part(Analysis(behind), "make").hours == pytest.approx(seconds / 3600)
    assert summary_of(front(Part(Analysis(behind), "make"))).repeats == runs
    newer = Cell(
        whole.batch_sizes[0], 0.0
    )  # another point is the best by now than the one that was repeated
    lower = [dataclasses.replace(filled[newer][-1], steps=1), *filled[newer][:-1]]
    outdone = dataclasses.replace(behind, results={**filled, newer: lower})
    assert complete_subset(outdone)[1] == left
    more = dataclasses.replace(behind, plan=RepeatPlan(2, 1, None))
    assert complete_subset(more) == (more, ""), "second ones are to come everywhere"
    missed = {"status": Status.INCOMPLETE, "steps": None}
    kept = {
        cell: [dataclasses.replace(r, **missed) for r in found] for cell, found in filled.items()
    }
    lost = {cell: kept[cell] if cell.sparsity == 0.5 else found for cell, found in filled.items()}
    assert complete_subset(dataclasses.replace(behind, results=lost))[1] == "", (
        "no complete trial, nothing to repeat"
    )


def test_a_figure_that_shows_both_studies_of_a_claim_names_no_further_study():
    parts = []
    for rule in ("momentum", "sgd"):
        arguments = {**CONFIG["model"]["init_args"], "optimizer": rule}
        config = {**CONFIG, "model": {**CONFIG["model"], "init_args": arguments}}
        record = dataclasses.replace(part(rule).study.record, config=config)
        parts.append(Part(Analysis(record), "make"))
    group = workload_and_goal(parts[0].study.record)
    for shown, others in ((("momentum", "sgd"), []), (("momentum",), ["momentum against sgd"])):
        image = Image("rules", "rules.png", "optimizers", shown)
        figure = section(front(*parts, comparisons={group: [image]}), "Figure 2")
        names = re.findall("`([^`]+)`", figure.rstrip().splitlines()[-1])
        assert names == [*shown, *others]


def test_the_rule_of_undecided_claims_names_the_claims_that_use_the_law():
    quantities = {"steps_per_doubling", "sparse_critical_ratio", "critical_ratio_of_optimizers"}
    critical = []
    of_law = []
    for number, claim in enumerate(CLAIMS.values(), start=1):
        if claim.quantity in quantities:
            critical.append(number)
        if claim.quantity in {*quantities, "c1_over_theory"}:
            of_law.append(number)
    text = " ".join(front(part("mnist")).split())
    use, needs = re.findall(r"Claims ([\d, and]+) (?:use the fitted law|also need)", text)
    assert (numbers_in(use), numbers_in(needs)) == (of_law, critical)
