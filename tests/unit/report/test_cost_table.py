"""The table of time and cost on the report page: its numbers, and what the sliders make of them."""

from __future__ import annotations

import dataclasses
import html
import json
import math
import re
import shutil
import subprocess

import pytest

from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.answer import answer_rows
from lit_dps.analysis.tables import three_digits
from lit_dps.core.step_timing import CellTiming, StepTiming
from lit_dps.core.text import format_duration
from lit_dps.core.trial import RANKS, Cell
from lit_dps.core.unit import SECONDS
from lit_dps.report.html import page
from lit_dps.report.html.cost_table import HOUR_SECONDS, Setting, cost_rows, timed_devices
from lit_dps.report.result_table import result_rows
from lit_dps.report.timing_notes import computation_text
from tests.unit.analysis.test_answer import K_STAR, study, timed
from tests.unit.report.test_golden import repeated_study, unreached_study

# Validation interval, devices and price of a device-hour.
SETTINGS = (
    Setting(None, 1, 1.0),
    Setting(10, 1, 2.5),
    Setting(50, 8, 0.3),
    Setting(1, 64, 20.0),
    Setting(4, 3, 0.0),
)
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
MOVE_SLIDERS = """
<script>
const shown = [];
for (const [position, devices, price] of POSITIONS) {
  find("interval").value = position;
  find("devices").value = devices;
  find("price").value = price;
  find("sliders").dispatchEvent(new Event("input"));
  const lines = [...find("costs").tBodies[0].rows];
  shown.push({
    setting: find("setting").value,
    rows: lines.map(line => [...line.cells].map(cell => cell.textContent)),
    best: lines.map(line => line.className === "best"),
  });
}
document.body.innerHTML = "<pre>" + JSON.stringify(shown).replaceAll("<", "&lt;") + "</pre>";
</script>
"""


def timed_study(validate_every=None):
    return Analysis(timed(study(), check=0.05), validate_every=validate_every)


def numbers_of(text):
    """The numbers that a page embeds."""
    (embedded,) = re.findall(r'id="cost-numbers">(.*?)</script>', text)
    return json.loads(embedded)


def expected_rows(setting):
    """The table at some positions, by the functions of the package alone."""
    analysis = timed_study(setting.validate_every)
    rows = []
    for row in analysis.answers.values():
        validation = row["validation_seconds"] or 0.0
        total = row["seconds"] + validation
        cost = total / HOUR_SECONDS * setting.devices * setting.price
        texts = map(format_duration, (row["seconds"], validation, total))
        rows.append([str(row["batch_size"]), *texts, three_digits(cost)])
    return rows


def in_chromium(text, folder):
    """The text of the body that a page has after its scripts have run."""
    if CHROMIUM is None:
        pytest.skip("no Chromium, which runs the script of the page")
    file = folder / "page.html"
    file.write_text(text)
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=5000"]
    command = [CHROMIUM, *options, "--dump-dom", file.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    (found,) = re.findall(r"<pre>(.*?)</pre>", done.stdout, re.DOTALL)
    return json.loads(html.unescape(found))


def test_the_first_position_has_the_times_of_the_screen():
    analysis = timed_study()
    rows = cost_rows(analysis, Setting(None, 1))
    printed = result_rows(analysis)
    assert len(rows) == len(printed) == 5
    for row, line in zip(rows, printed, strict=True):
        number, unit = (
            line["time to goal [95 %]"].split()[0],
            line["time to goal [95 %]"].split()[-1],
        )
        assert row["training"] == row["total"] == f"{number} {unit}"
        assert row["validation"] == "0 s"
        assert (row[""] == "fastest") == (line[""] == "fastest")
    text = page(analysis)
    for row in rows:
        assert f"<td>{row['total']}</td><td>{row['cost']}</td>" in text
    numbers = numbers_of(text)
    assert (numbers["validate_every"], numbers["devices"], numbers["price"]) == (None, 1, 1.0)
    assert numbers["intervals"] == [1, 2, 4, 5, 10, 20, 50, 100, 200, 500, None]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_the_embedded_numbers_give_the_times_of_the_package(setting):
    record = timed(study(), check=0.05)
    analysis = Analysis(record)
    numbers = numbers_of(page(analysis))
    table = answer_rows(
        record,
        analysis.cells,
        analysis.step_seconds,
        analysis.expected_steps,
        setting.validate_every,
    )
    assert len(numbers["rows"]) == len(table) == 5
    for row, (_, expected) in zip(numbers["rows"], table.iterrows(), strict=True):
        total = row["seconds"]
        if setting.validate_every is not None:
            validation = math.ceil(row["steps"] / setting.validate_every) * row["check"]
            assert validation == expected["validation_seconds"]
            total += validation
        assert row["seconds"] == expected["seconds"] and total > 0
    shown = cost_rows(timed_study(setting.validate_every), setting)
    assert [list(row.values())[:-1] for row in shown] == expected_rows(setting)


def test_the_sliders_give_the_times_of_the_package(tmp_path):
    text = page(timed_study())
    intervals = numbers_of(text)["intervals"]
    positions = []
    for setting in SETTINGS:
        positions.append(
            [intervals.index(_known(setting, intervals)), setting.devices, setting.price]
        )
    script = MOVE_SLIDERS.replace("POSITIONS", json.dumps(positions))
    shown = in_chromium(text.replace("</body>", f"{script}</body>"), tmp_path)
    assert len(shown) == len(SETTINGS)
    winners = set()
    for setting, found in zip(SETTINGS, shown, strict=True):
        assert found["setting"] == str(setting)
        rows = cost_rows(timed_study(setting.validate_every), setting)
        assert found["rows"] == [list(row.values()) for row in rows]
        assert found["best"] == [row[""] == "fastest" for row in rows]
        winners.add(found["best"].index(True))
    assert len(winners) > 1, "no slider moved the fastest batch size"


def _known(setting, intervals):
    assert setting.validate_every in intervals
    return setting.validate_every


def test_the_script_writes_numbers_as_the_package_does(tmp_path):
    durations = [0.0, 3.3e-9, 4.56e-4, 0.09999, 0.9996, 1.0, 59.96, 119.9, 120.0, 7199.0]
    durations += [7200.5, 99_960.0, 172_800.0, 9.876e6]
    # Halves of the third digit, which Python rounds to an even one.
    durations += [1.125, 1.375, 10.25, 102.5, 7.5 * 86_400 + 10.8, 0.001953125]
    costs = [0.125, 1.125, 1.375, 10.25, 10.75, 100.5, 1002.5, 12_250.0, 0.0001220703125]
    costs += [0.0, 1.234e-9, 9.999e-5, 1e-4, 0.000131, 0.17, 1.0, 99.96, 100.4, 123_456.0, 2.5e8]
    script = f"""<script>
    const texts = [{durations}.map(durationText), {costs}.map(numberText)];
    document.body.innerHTML = "<pre>" + JSON.stringify(texts) + "</pre>";
    </script>"""
    text = page(timed_study()).replace("</body>", f"{script}</body>")
    shown = in_chromium(text, tmp_path)
    assert shown == [list(map(format_duration, durations)), list(map(three_digits, costs))]


def test_no_part_is_wider_than_a_narrow_window(tmp_path):
    inner = page(repeated_study()).replace("<details", "<details open")
    script = """<script>
    onload = () => {
      const page = document.querySelector("iframe").contentDocument.documentElement;
      const boxes = [...page.querySelectorAll("img, .scroll, pre, .answer, #sliders")];
      const widest = Math.max(...boxes.map(box => box.getBoundingClientRect().right));
      const found = [page.scrollWidth, widest, boxes.length];
      document.body.innerHTML = "<pre>" + JSON.stringify(found) + "</pre>";
    };
    </script>"""
    frame = f'<iframe srcdoc="{html.escape(inner)}" style="width: 420px; border: 0"></iframe>'
    width, widest, boxes = in_chromium(f"<body>{script}{frame}</body>", tmp_path)
    assert width <= 420 and widest <= 420 and boxes > 5


def test_unknown_times_are_no_numbers():
    with_checks = repeated_study()  # its steps were timed together with validations
    rows = cost_rows(with_checks, Setting(None, 1))
    assert {row["validation"] for row in rows} == {"-"}
    text = page(with_checks)
    assert 'id="interval"' not in text and "It includes validation" in text
    # No validation can be added.
    validated = Analysis(with_checks.record, validate_every=10)
    assert cost_rows(validated, Setting(10, 1)) == rows
    assert "Shown: <output" in page(validated) and "no validation, 1 device" in page(validated)
    assert 'id="costs"' not in page(unreached_study())


def test_devices_begin_at_the_number_that_was_timed():
    record = timed(study())
    cells = tuple(CellTiming(Cell(b), (0.1,), 0.05) for b in K_STAR)
    timing = StepTiming("a machine", "2026-11-29", 1, 4, cells)
    on_four = Analysis(dataclasses.replace(record, step_timing=timing))
    assert timed_devices(on_four) == [4]
    text = page(on_four)
    assert numbers_of(text)["devices"] == 4 and 'id="devices" min="4"' in text
    assert "timed steps on 4 devices" in text
    results = dict(record.results)
    first = next(iter(results))
    results[first] = [
        dataclasses.replace(each, flags={**each.flags, RANKS: 2}) for each in results[first]
    ]
    mixed = Analysis(dataclasses.replace(record, results=results))
    assert timed_devices(mixed) == [1, 2]
    assert 'id="costs"' not in page(mixed) and "The cost is unknown" in page(mixed)


def test_the_computation_of_the_training_time_follows_the_goal_and_the_schedule():
    product = "the steps to the goal times the time of a step"
    constant = timed_study()
    assert computation_text(constant) == product
    assert f"Training: {product}." in html.unescape(page(constant))
    in_seconds = dataclasses.replace(
        constant.record, goal=dataclasses.replace(constant.record.goal, unit="seconds")
    )
    results = {}
    for cell, trials in in_seconds.results.items():
        results[cell] = []
        for each in trials:
            last = each.curve["step"][-1]
            steps = list(range(4, last + 1, 4))
            curve = {"step": steps, "val_error": [0.5] * len(steps)}
            curve["seconds"] = [0.01 * step for step in steps]
            results[cell].append(dataclasses.replace(each, curve=curve, unit=SECONDS))
    in_seconds = Analysis(dataclasses.replace(in_seconds, results=results))
    assert in_seconds.answers[Cell(64)]["seconds"] == pytest.approx(0.01 * K_STAR[64])
    assert computation_text(in_seconds) == "K* in seconds of training"
    warm_up = {"schedule": "doubling", "options": {"start": 0.25, "steps": 10}}
    growing = Analysis(dataclasses.replace(constant.record, config={"batch": warm_up}))
    for other in (in_seconds, growing):
        text = html.unescape(page(other))
        assert f"Training: {computation_text(other)}." in text
        assert product not in text
    assert "own clock" in computation_text(growing)
