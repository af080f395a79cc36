"use strict";
const find = id => document.getElementById(id);

// Time and cost: the formulas of cost_table.py, and its texts.
const UNITS = [
  ["days", 86400, 172800], ["h", 3600, 7200], ["min", 60, 120], ["s", 1, 1],
  ["ms", 1e-3, 1e-3], ["us", 1e-6, 1e-6], ["ns", 1e-9, 1e-9],
];

// A number with three significant digits. JavaScript rounds a tie up; Python rounds it to even.
function threeDigits(number) {
  const exact = number.toExponential(100);
  const isTie = /^\d\.\d\d50*e/.test(exact);
  if (isTie && "02468".includes(exact[3])) return exact.slice(0, 4) + exact.replace(/.*e/, "e");
  return number.toExponential(2);
}

function durationText(seconds) {
  if (seconds === null) return "-";
  if (seconds === 0) return "0 s";
  for (const [unit, size, smallest] of UNITS) {
    if (seconds >= smallest) {
      const rounded = threeDigits(seconds / size);
      const decimals = 2 - Number(rounded.split("e")[1]);
      return Number(rounded).toFixed(Math.max(decimals, 0)) + " " + unit;
    }
  }
  return "less than 1 ns";
}

function numberText(number) {
  if (number === null) return "-";
  const rounded = Number(threeDigits(number));
  if (rounded >= 100 && rounded < 1e7) return rounded.toFixed(0);
  if (rounded === 0 || (rounded >= 1e-4 && rounded < 1e7)) return String(rounded);
  return rounded.toExponential().replace(/([+-])(\d)$/, (_, sign, digit) => sign + "0" + digit);
}

// The costs of a row at some positions of the sliders; null stands for an unknown number. A series
// in which no validation was timed is compared without validation.
function costsOf(row, isValidated, interval, devices, price) {
  let validation = null;
  if (row.check !== null) {
    validation = interval === null ? 0 : Math.ceil(row.steps / interval) * row.check;
  }
  const isUnknown = isValidated && interval !== null && validation === null;
  if (row.seconds === null || isUnknown) return {validation, total: null, cost: null};
  const total = row.seconds + (validation ?? 0);
  return {validation, total, cost: total / 3600 * devices * price};
}

function updateCosts(numbers) {
  const slider = find("interval");
  const interval = slider ? numbers.intervals[slider.value] : null;
  const devices = Number(find("devices").value);
  const price = Number(find("price").value);
  const shownInterval = interval === null ? "never" : String(interval);
  if (slider) {
    find("interval-value").value = shownInterval;
    slider.setAttribute("aria-valuetext", shownInterval);
  }
  find("devices-value").value = devices;
  find("price-value").value = price;
  find("setting").value = [
    interval === null ? "no validation" : `validation every ${interval === 1 ? "step" : `${interval} steps`}`,
    devices === 1 ? "1 device" : `${devices} devices`,
    `${price} per device-hour`,
  ].join(", ");

  const fastest = new Map();
  const validated = new Set(numbers.rows.filter(row => row.check !== null).map(row => row.series));
  const costs = numbers.rows.map(
    row => costsOf(row, validated.has(row.series), interval, devices, price));
  numbers.rows.forEach((row, i) => {
    const best = fastest.get(row.series);
    if (costs[i].total === null) return;
    if (best === undefined || costs[i].total < costs[best].total) fastest.set(row.series, i);
  });
  [...find("costs").tBodies[0].rows].forEach((line, i) => {
    const {bound, series} = numbers.rows[i];
    const {validation, total, cost} = costs[i];
    const cells = [...line.cells].slice(-4);
    cells[0].textContent = (validation ? bound : "") + durationText(validation);
    cells[1].textContent = total === null ? "-" : bound + durationText(total);
    cells[2].textContent = total === null ? "-" : bound + numberText(cost);
    const isFastest = fastest.get(series) === i;
    cells[3].textContent = isFastest ? "fastest" : "";
    line.classList.toggle("best", isFastest);
  });
}

if (find("cost-numbers")) {
  const numbers = JSON.parse(find("cost-numbers").textContent);
  find("sliders").hidden = false;
  find("sliders").addEventListener("input", () => updateCosts(numbers));
  updateCosts(numbers);
}

// Tables that a click on a column head sorts. Rows without a value stay below.
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.querySelectorAll("th")];
  heads.forEach((head, column) => head.firstChild.addEventListener("click", () => {
    const isUp = head.getAttribute("aria-sort") !== "ascending";
    const body = table.tBodies[0];
    const key = row => row.cells[column].textContent;
    const compare = (a, b) => {
      const [x, y] = [key(a), key(b)];
      if (x === "-" || y === "-") return (x === "-") - (y === "-");
      const order = isNaN(x) || isNaN(y) ? x.localeCompare(y) : x - y;
      return isUp ? order : -order;
    };
    heads.forEach(other => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", isUp ? "ascending" : "descending");
    body.append(...[...body.rows].sort(compare));
  }));
}

// A click on a picture shows it at its full width, within its own box.
for (const plate of document.querySelectorAll(".plate")) {
  plate.addEventListener("click", () => plate.classList.toggle("full"));
}

// Buttons that save a picture of the page.
const PNG_SCALE = 3;  // image pixels for each pixel of the page

function save(source, file) {
  const link = document.createElement("a");
  link.href = source;
  link.download = file;
  link.click();
}

function pngOf(image) {
  const canvas = document.createElement("canvas");
  canvas.width = PNG_SCALE * image.getAttribute("width");
  canvas.height = PNG_SCALE * image.getAttribute("height");
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL("image/png");
}

for (const button of document.querySelectorAll(".save")) {
  const image = button.closest("figure").querySelector("img");
  const {kind, file} = button.dataset;
  const isStored = image.src.startsWith(kind === "svg" ? "data:image/svg" : "data:image/png");
  button.hidden = false;
  button.addEventListener("click", () => {
    save(isStored ? image.src : pngOf(image), `${file}.${kind}`);
  });
}

// Folded sections are open in print.
const closed = new Set();
addEventListener("beforeprint", () => {
  for (const section of document.querySelectorAll("details.printed:not([open])")) {
    closed.add(section);
    section.open = true;
  }
});
addEventListener("afterprint", () => {
  closed.forEach(section => section.open = false);
  closed.clear();
});
