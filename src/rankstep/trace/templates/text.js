// Numbers with units, and elements whose text is text: nothing here ever reads a name as HTML.

let errors = 0;
const complain = (message) => {
  errors += 1;
  document.body.dataset.errors = errors;
  notice("This page has a fault, and what it shows may be incomplete: " + message);
};
window.addEventListener("error", (event) => complain(event.message));
window.addEventListener("unhandledrejection", (event) => complain(String(event.reason)));

const byId = (id) => document.getElementById(id);

function el(tag, options = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(options)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "class") node.className = value;
    else if (name === "text") node.textContent = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children);
  return node;
}

function notice(text) {
  byId("notices").append(el("p", { class: "notice", text }));
}

// A user's name: kept apart, so that letters that run right to left do not reorder what stands around it.
const nameEl = (text) => el("bdi", { class: "name", text });

const plural = (count, word) => `${count.toLocaleString("en-US")} ${word}${count === 1 ? "" : "s"}`;

const UNITS = [["s", 1e9], ["ms", 1e6], ["µs", 1e3], ["ns", 1]];

// Three figures with the unit that suits: 41.2 ms, 820 ns.
function duration(ns) {
  if (ns === null || ns === undefined || Number.isNaN(ns)) return "–";
  const size = Math.abs(ns);
  if (size === 0) return "0 ms";
  let [unit, scale] = UNITS.find(([, ns]) => size >= ns * 0.9995) || UNITS[3];
  const value = size / scale;
  const digits = unit === "ns" || value >= 99.95 ? 0 : value >= 9.995 ? 1 : 2;
  return `${ns < 0 ? "−" : ""}${value.toFixed(digits)} ${unit}`;
}

// One unit and one number of digits for a whole column, so that its numbers can be compared at a glance.
function column(values) {
  const sizes = values.filter((value) => value !== null && value !== undefined).map(Math.abs);
  const largest = sizes.length ? Math.max(...sizes) : 0;
  const [unit, scale] = largest === 0 ? UNITS[1] : UNITS.find(([, ns]) => largest >= ns) || UNITS[3];
  const value = largest / scale;
  const digits = unit === "ns" || largest === 0 ? 0 : value >= 100 ? 1 : value >= 10 ? 2 : 3;
  return {
    unit,
    text: (ns) => (ns === null || ns === undefined ? "–" : (ns / scale).toFixed(digits).replace("-", "−")),
  };
}

function bytes(count) {
  for (const [unit, scale] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]]) {
    if (count >= scale) return `${(count / scale).toPrecision(count / scale >= 1000 ? 4 : 3)} ${unit}`;
  }
  return `${count} B`;
}

function percent(part, whole) {
  if (!(whole > 0)) return "–";
  const share = (100 * part) / whole;
  return share > 0 && share < 0.5 ? "< 1 %" : `${Math.round(share)} %`;
}

// "0–3, 8": runs of numbers, as a person writes them.
function runs(numbers) {
  const parts = [];
  for (let i = 0; i < numbers.length; ) {
    let j = i;
    while (j + 1 < numbers.length && numbers[j + 1] === numbers[j] + 1) j += 1;
    parts.push(j > i + 1 ? `${numbers[i]}–${numbers[j]}` : numbers.slice(i, j + 1).join(", "));
    i = j + 1;
  }
  return parts.join(", ");
}

function median(values) {
  if (!values.length) return 0;
  const sorted = [...values].sort((a, b) => a - b);
  const middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

const mean = (values) => (values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : 0);
const clamp = (value, low, high) => Math.min(Math.max(value, low), Math.max(low, high));
