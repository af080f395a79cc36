"""Whole texts of small studies: reports, notes, figure texts and the report page.

After a change of wording run `python -m pytest --update-golden tests/unit/report/test_golden.py`
and read `git diff tests/golden/report`.
"""

from __future__ import annotations

import dataclasses
import html
import math
import re

import matplotlib.text
import pytest

from lit_dps.analysis.analysis import Analysis
from lit_dps.core.environment import DATA, SOURCES, THREADS, UNKNOWN, with_key
from lit_dps.core.goal import Goal
from lit_dps.core.record import grid
from lit_dps.core.search_space import Range
from lit_dps.core.trial import (
    BY_NODES,
    BY_WEIGHTS,
    CHANGE_EVERY,
    COPIES,
    IN_NO_MASK,
    JOINED_AT,
    KEPT,
    LIGHTNING,
    PEAK_OF_PROCESS,
    PRUNABLE,
    RANKS,
    SCHEDULE,
    SHORT_STEPS,
    SPARSE_KERNELS,
    STACKED,
    TRAINED,
    TRAINED_THEN,
    UNCOUNTED_STEPS,
    UNSCORED,
    WARM_UP,
    Cell,
)
from lit_dps.report.figures import FIGURES
from lit_dps.report.figures.write import drawn
from lit_dps.report.html import page
from lit_dps.report.screen import screen
from lit_dps.report.text import SECTIONS
from tests.support.fake_study import analysis_of, law_results, measured, result, theory_terms
from tests.unit.analysis.test_delay import study as delay_study
from tests.unit.analysis.test_local_analysis import FLAT_THEN_UP
from tests.unit.analysis.test_local_analysis import study as local_study
from tests.unit.replication.test_claims_repeats import with_repeats

RATES = {"model.learning_rate": Range(1e-3, 10.0, "log")}


def clear_study() -> Analysis:
    """A law with a clear bend at two sparsities, with measured terms of the theory."""
    laws = {0.0: (4e4, 60), 0.9: (1e5, 100)}
    results = {}
    for cell in grid((4, 16, 64, 256, 1024), laws):
        results[cell] = []
        for trial in law_results(cell, 6, *laws[cell.sparsity]):
            trial = measured(trial)
            terms = theory_terms(trial.steps_run, lipschitz=[1 + cell.sparsity] * 2)
            results[cell].append(dataclasses.replace(trial, flags=terms["flags"]))
    return analysis_of(results, "clear", trials=6)


def refused_study() -> Analysis:
    """A law without a bend, so that no critical batch size can be named."""
    cells = [Cell(b, 0.0) for b in (4, 16, 64)]
    return analysis_of({cell: law_results(cell, 4, 4e4, 1) for cell in cells}, "refused", trials=4)


def unreached_study() -> Analysis:
    """A study in which no trial reached the goal; some diverged."""
    goal = Goal(0.1, check_interval=16, max_steps=64)
    curve = {
        "step": [16, 32, 48, 64],
        "val_error": [0.6, 0.4, 0.3, 0.25],
        "train_loss": [2.0, 1.5, 1.2, 1.0],
    }
    results = {}
    for batch_size in (8, 16):
        cell = Cell(batch_size, 0.0)
        results[cell] = [
            result(cell, 0, None, params={"model.learning_rate": 9.9}, curve=curve, seconds=1.0),
            result(cell, 1, None, params={"model.learning_rate": 0.1}, curve=curve, seconds=1.0),
            result(cell, 2, None, "infeasible", params={"model.learning_rate": 8.0}, seconds=0.1),
        ]
    return analysis_of(results, "unreached", trials=3, goal=goal, space=RATES)


def repeated_study() -> Analysis:
    """A study whose best samples were repeated on fresh seeds."""
    cells = [Cell(b, 0.0) for b in (4, 16, 64, 256)]
    bare = analysis_of({cell: law_results(cell, 6, 4e4, 60) for cell in cells}, trials=6)
    return with_repeats(bare, [1.0, 1.1, 1.2, 1.4, None])


def noted_study() -> Analysis:
    """A study with a reason for nearly every note."""
    dense, sparse, other = Cell(8, 0.0), Cell(8, 0.9), Cell(64, 0.9)
    params = {"model.learning_rate": 9.9}
    parts = {"a.w": (10, 100), "b.w": (5, 100), "c.w": (5, 100), "d.w": (5, 100)}
    flags = {
        SHORT_STEPS: 20,
        UNCOUNTED_STEPS: 10,
        UNSCORED: 7,
        KEPT: 50,
        PRUNABLE: 200,
        TRAINED: 456,
        COPIES: 3,
        STACKED: 1,
        SPARSE_KERNELS: 1,
        RANKS: 2,
        PEAK_OF_PROCESS: 1,
        IN_NO_MASK: 40,
        TRAINED_THEN: 200,
        JOINED_AT: 32,
        CHANGE_EVERY: 1000,
        BY_NODES: 1,
        WARM_UP: 400,
        SCHEDULE: 1000,
    }
    nan_curve = {"step": [16, 32], "val_error": [math.nan, 0.05], "train_loss": [1.0, 1.0]}
    environments = [
        with_key(
            {"version.torch": torch, "version.timm": timm, THREADS: threads, SOURCES: s, DATA: d},
            since,
        )
        for torch, timm, threads, s, d, since in (
            ("2.15", "1.0", 1, {"a.py": ["1"]}, {"": ["1"]}, "2026-11-27 10:00"),
            ("2.16", "1.1", 2, {"a.py": ["2"], "b.Net": UNKNOWN}, {"": ["2"]}, "2026-11-28 10:00"),
        )
    ]
    first, second = (each["key"] for each in environments)
    results = {
        dense: [
            result(dense, 0, 320, params=params, flags=flags, kept=parts, environment=first),
            result(dense, 1, None, "failed", params=params, failure="ValueError: some shape"),
            result(dense, 2, None, "stopped", params=params, failure="EarlyStopping: no gain"),
        ],
        sparse: [
            result(
                sparse,
                0,
                16,
                params=params,
                flags={BY_WEIGHTS: 1, SCHEDULE: 1000, WARM_UP: 10},
                kept=parts,
                environment=second,
                engine=LIGHTNING,
            ),
            result(sparse, 1, 32, params=params, curve=nan_curve, engine="single"),
        ],
        other: [
            result(other, 0, None, params=params, curve={**nan_curve, "val_error": [0.4, 0.3]})
        ],
    }
    return analysis_of(
        results,
        "noted",
        trials=4,
        space=RATES,
        environments=environments,
        config={"study": {"name": "noted", "sampler": "tpe", "best_of": "other"}},
        running={dense: 1},
    )


STUDIES = {
    "clear": clear_study,
    "refused": refused_study,
    "unreached": unreached_study,
    "repeats": repeated_study,
    "delay": lambda: delay_study(lambda b, delay: 4e4 / b + 60 * (1 + delay), spread=(1.0, 1.2)),
    "local": lambda: local_study(FLAT_THEN_UP),
    "noted": noted_study,
}


@pytest.fixture(scope="module", params=STUDIES)
def named_study(request):
    return request.param, STUDIES[request.param]()


def test_the_report_in_the_terminal(named_study, golden):
    name, study = named_study
    golden.check(f"report/{name}.txt", screen(study, SECTIONS))


@pytest.mark.pictures
def test_the_texts_of_the_figures(named_study, golden):
    name, study = named_study
    golden.check(f"report/{name}-figures.txt", figure_texts(study))


def figure_texts(study: Analysis) -> str:
    """Return each figure's caption, notes and texts, or why the study has no such figure."""
    lines = []
    for figure in FIGURES:
        lines.append(f"{figure.NAME}: {figure.CAPTION}")
        reason = figure.missing(study)
        if reason is not None:
            lines.append(f"  missing: {reason}")
            continue
        lines += [f"  note: {note}" for note in figure.notes(study)]
        picture = drawn(figure, study)
        texts = dict.fromkeys(text.get_text() for text in picture.findobj(matplotlib.text.Text))
        lines += [f"  {text!r}" for text in texts if text and not re.fullmatch(r"[\d.e+-]+", text)]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("name", ["clear", "unreached", "repeats"])
def test_the_text_of_the_page(name, golden):
    golden.check(f"report/{name}-page.txt", page_text(page(STUDIES[name]())))


def page_text(text: str) -> str:
    """Return what a reader sees of a page, a line each element, without versions."""
    text = re.sub(r"<(script|style)\b.*?</\1>", "", text, flags=re.DOTALL)
    text = re.sub(r"</(td|th)>", " | ", text)
    text = re.sub(r"</(p|h1|h2|li|dt|dd|tr|summary|figcaption|title)>", "\n", text)
    text = html.unescape(re.sub(r"<[^>]*>", "", text))
    text = re.sub(r"(lit_dps|optuna) \d[\w.+]*", r"\1 VERSION", text)
    lines = [line.rstrip() for line in text.splitlines()]
    return "\n".join(line for line in lines if line) + "\n"
