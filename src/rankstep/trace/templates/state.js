// What is chosen: step, rank, ranks shown, lanes, and the stretch of time in view. It is kept in the address, so that a
// link leads to the same picture.

const state = {
  trace: null,
  step: 0, // a step's number
  rank: 0, // a position in trace.ranks
  shown: [], // positions in trace.ranks
  filter: "",
  lanes: "full",
  left: 0, // time at the left edge
  right: 1,
};

const SHORTEST = 200; // nanoseconds in view

// "0-3,8" against the ranks there are; null where it cannot be understood.
function parseRanks(text, ranks) {
  if (!text.trim()) return ranks.map((_, i) => i);
  const wanted = new Set();
  for (const part of text.split(/[,;\s]+/).filter(Boolean)) {
    const found = /^(\d+)(?:[-–](\d+))?$/.exec(part);
    if (!found) return null;
    const from = Number(found[1]), to = found[2] === undefined ? from : Number(found[2]);
    ranks.forEach((rank, i) => {
      if (rank.rank >= from && rank.rank <= to) wanted.add(i);
    });
  }
  return [...wanted].sort((a, b) => a - b);
}

function stepWindow(number) {
  return state.trace.windows.get(number) || { begin: state.trace.begin, end: state.trace.end };
}

// Show a stretch of time, kept within the run and a little margin.
function look(left, right) {
  const { begin, end } = state.trace;
  const margin = Math.max(1, (end - begin) * 0.02);
  const length = clamp(right - left, SHORTEST, end - begin + 2 * margin);
  const middle = (left + right) / 2;
  state.left = clamp(middle - length / 2, begin - margin, end + margin - length);
  state.right = state.left + length;
}

function lookAtStep() {
  const { begin, end } = stepWindow(state.step);
  const margin = Math.max(1, (end - begin) * 0.01);
  look(begin - margin, end + margin);
}

// Zoom about a place: what is there stays there.
function zoom(factor, at = (state.left + state.right) / 2) {
  const { begin, end } = state.trace;
  const length = clamp((state.right - state.left) * factor, SHORTEST, (end - begin) * 1.04 + 2);
  const part = (at - state.left) / (state.right - state.left);
  look(at - part * length, at + (1 - part) * length);
}

function pan(part) {
  const by = (state.right - state.left) * part;
  look(state.left + by, state.right + by);
}

function readAddress() {
  const wanted = new URLSearchParams(location.hash.slice(1));
  const { trace } = state;
  if (trace.windows.has(Number(wanted.get("step"))) && wanted.has("step")) state.step = Number(wanted.get("step"));
  const rank = trace.ranks.findIndex((one) => String(one.rank) === wanted.get("rank"));
  if (rank >= 0) state.rank = rank;
  if (wanted.has("ranks") && parseRanks(wanted.get("ranks"), trace.ranks)) state.filter = wanted.get("ranks");
  if (["full", "compact"].includes(wanted.get("lanes"))) state.lanes = wanted.get("lanes");
  if (["light", "dark"].includes(wanted.get("theme"))) document.documentElement.dataset.theme = wanted.get("theme");
}

function writeAddress() {
  const now = new URLSearchParams();
  now.set("step", state.step);
  if (state.trace.ranks.length) now.set("rank", state.trace.ranks[state.rank].rank);
  if (state.filter) now.set("ranks", state.filter);
  now.set("lanes", state.lanes);
  const { theme } = document.documentElement.dataset;
  if (theme) now.set("theme", theme);
  try {
    history.replaceState(null, "", "#" + now);
  } catch {
    // Some viewers forbid it; the address then stays as it is.
  }
}
