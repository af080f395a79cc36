"""The page of the replication: which study each claim and figure stands at, and how short it is."""

import dataclasses

import optuna
import pytest

from lit_dps.analysis.analysis import Analysis
from lit_dps.core.goal import Goal
from lit_dps.core.repeats import RepeatPlan
from lit_dps.core.trial import Cell, Status
from lit_dps.replication.claims import judge_claims
from lit_dps.replication.comparable import workload_and_goal
from lit_dps.replication.incomplete_cells import complete_subset
from lit_dps.replication.page import headlines
from lit_dps.replication.parts import Core, Image, Part
from lit_dps.storage.read import read_study
from tests.support.claims import CLAIMS
from tests.support.fake_study import result, write_study
from tests.unit.replication.test_claims_terms import PAPER, theory
from tests.unit.replication.test_replication import CONFIG, front, part, section


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


def test_a_claim_stands_at_the_largest_study_that_decides_it():
    small, large, undecided = (
        k_stars("small", 1e6, 5),
        k_stars("large", 1e6, 7),
        k_stars("few", 1e6, 2),
    )
    linear_text = CLAIMS["linear-scaling"].claim
    parts = [small, large, undecided]
    judgements = judge_claims(
        [part.study for part in parts], {part.study.record.name: part.command for part in parts}
    )
    at = {claim.id: judgement for claim, judgement in headlines(judgements, parts).items()}
    linear = at["linear-scaling"]
    assert (linear.where, linear.verdict) == ("large", "seen")
    text = front(*parts)
    assert "| `large` | seen |" in text
    nowhere = at["critical-of-momentum"]
    assert nowhere.where == "" and nowhere.verdict == "not decidable at this scale"
    assert "do not decide" not in text and "decided at the paper's goal or a harder one: 0." in text

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
    assert dataclasses.replace(large, incomplete="S = 0.9").scale < small.scale, (
        "more trials, but of a half-done study"
    )
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
    assert " goal: 3 up to B = 8 (the paper: 100, 16,384)." in text
    assert " goal: 3 up to B = 8, 15 up to B = 2 (" in front(*parts, hard, deep)
    assert "| `large` | seen at a smaller scale, undecided at the largest |" in text
    (line,) = [
        line
        for line in section(text, "Where the largest studies do not decide").splitlines()
        if linear_text in line
    ]
    assert " from B=2 to B=8, e = -0.161 [" in line
    assert line.endswith("(`hard`)")
    fine = dataclasses.replace(small.study.record, name="fine", goal=hard.study.record.goal)
    wide = {}
    for cell, results in hard.study.record.results.items():
        wide[cell] = [
            dataclasses.replace(r, trial=dataclasses.replace(r.trial, point=i))
            for i, r in enumerate(results * 20)
        ]
    wide = dataclasses.replace(hard.study.record, name="wide", trials=60, results=wide)
    text = front(*(Part(Analysis(record), "make") for record in (fine, wide)))
    (row,) = [line for line in text.splitlines() if "diminishing returns" in line and "|" in line]
    assert row.endswith("| `wide` | seen |"), "both are of the paper's goal"


def test_a_study_that_decides_otherwise_stands_beside_the_verdict():
    rises, falls = theory(**PAPER).record, theory(lipschitz=0.5, points=4).record
    parts = [
        Part(Analysis(dataclasses.replace(r, name=n)), "make")
        for n, r in (("rises", rises), ("falls", falls))
    ]
    (row,) = (line for line in front(*parts).splitlines() if line.startswith("| L rises"))
    assert row.endswith("| `rises` | seen; not seen by `falls` |")
    (row,) = (line for line in front(parts[0]).splitlines() if line.startswith("| L rises"))
    assert row.endswith("| `rises` | seen |")


def test_the_front_page_has_the_papers_figures_from_the_widest_study_and_is_short():
    shown = [Image("curve", f"{name}.png", "scaling") for name in ("small", "large")]
    small, large = k_stars("small", 1e6, 5), k_stars("large", 1e6, 7)
    small, large = (
        dataclasses.replace(p, images=[image])
        for p, image in zip((small, large), shown, strict=True)
    )
    theirs = {
        workload_and_goal(large.study.record): [Image("ratios", "ratios.png", "ratios")],
        "other": [],
    }
    text = front(small, large, comparisons=theirs)
    assert "![curve](large.png)" in section(text, "Figure 1") and "small.png" not in text
    assert "![ratios](ratios.png)" in section(text, "Figure 12") and "## Figure 4" not in text
    assert "2 studies, 36 trials" in text and len(text.split()) < 1500
    further = k_stars("further", 1e6, 9, speed=8)
    assert "3 studies, 42 trials" in front(small, large, further), (
        "the 21 of the large one are taken over, and count once"
    )
    assert f"| `large` | S=0 | {' | '.join(critical_of(large))} |" in section(
        text, "Critical batch sizes"
    )
    deep = k_stars("deep", 1e6, 30, sizes=(2, 8))
    deep = dataclasses.replace(deep, images=[Image("curve", "deep.png", "scaling")])
    text = front(large, deep)
    assert deep.scale > large.scale and "| `deep` | seen |" in text, (
        "claims stand at the most trials"
    )
    assert "![curve](large.png)" in text and "deep.png" not in text, (
        "but a curve has more batch sizes at fewer"
    )
    assert "| `large` | S=0 |" in section(text, "Critical batch sizes")


def test_what_two_claims_rest_on_is_said_once():
    record = part("grows").study.record
    init = CONFIG["model"]["init_args"] | {"optimizer": "momentum"}
    record = dataclasses.replace(
        record, config=CONFIG | {"model": CONFIG["model"] | {"init_args": init}}
    )
    text = front(Part(Analysis(record), "make grows"))
    rows = [line for line in text.splitlines() if "the critical batch size of 90 % sparse" in line]
    assert [row.count("| as above |") for row in rows] == [0, 1] and "B_crit" in rows[0]
    assert "as above" not in front(k_stars("dense", 1e6, 5)), "nowhere is no number"


def test_a_number_that_the_paper_does_not_have_is_a_disagreement_where_the_claim_is_seen():
    told = section(front(Part(theory(beta=0.3), "make")), "Where it disagrees")
    falls = "- **the gradient variance beta falls at 90 %**: seen; the paper's number is outside."
    assert falls in told
    assert falls not in section(front(Part(theory(beta=0.54), "make")), "Where it disagrees")
    rises = section(front(Part(theory(beta=2.0), "make")), "Where it disagrees")
    assert "beta falls at 90 %**: not seen; the paper's number is outside." in rises


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
    assert (record.sparsities, record.batch_sizes, left) == (
        (0.0,),
        (only.batch_size,),
        f"all but S = 0 and B = {only.batch_size}",
    )
    assert record.results == {only: whole.results[only]}


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
    text = " ".join(front(Part(Analysis(grown), "make")).split())
    told = f"{len(ran)} to {planned} seeds" if len(ran) < planned else f"{planned} seeds"
    assert f" over {told} of the best points" in text
    bare = front(k_stars("bare", 1e6, 8))
    assert " over seeds of the best points" in " ".join(bare.split())


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
    assert left == "S = 0.5" and record == whole and complete_subset(whole) == (whole, "")
    assert "left out: `grows` at S = 0.5." in front(Part(Analysis(record), "make", incomplete=left))
    dense = dataclasses.replace(
        grown, results={c: r if c.sparsity < 0.5 else [] for c, r in grown.results.items()}
    )
    assert (
        complete_subset(dense)[0].sparsities == (0.0,)
        and complete_subset(dense)[1] == "S = 0.5, 0.9"
    )
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
    assert complete_subset(behind)[1] == "S = 0.5", "its repeats are still to come"
    runs = sum(len(found) for found in repeats.values())
    seconds = sum(
        r.seconds for by_cell in (filled, repeats) for results in by_cell.values() for r in results
    )
    assert Part(Analysis(behind), "make").hours == pytest.approx(seconds / 3600)
    assert f" trials, {runs} repeats of best points, " in front(Part(Analysis(behind), "make"))
    newer = Cell(
        whole.batch_sizes[0], 0.0
    )  # another point is the best by now than the one that was repeated
    lower = [dataclasses.replace(filled[newer][-1], steps=1), *filled[newer][:-1]]
    outdone = dataclasses.replace(behind, results={**filled, newer: lower})
    assert complete_subset(outdone)[1] == "S = 0.5"
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
