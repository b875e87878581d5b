// Choosing, and putting it all together.

let paintSummary = () => {};

function chooseStep(number, follow = true) {
  state.step = number;
  view.chosen = null;
  showTooltip(null);
  if (follow) lookAtStep();
  refresh();
}

function chooseStepBy(by) {
  const { numbers } = state.trace;
  const at = clamp(numbers.indexOf(state.step) + by, 0, numbers.length - 1);
  if (numbers.length) chooseStep(numbers[at]);
}

function chooseRank(index) {
  state.rank = index;
  view.chosen = null;
  refresh();
}

function chooseNeighbour(by) {
  if (!state.shown.length) return;
  const at = state.shown.indexOf(state.rank);
  chooseRank(state.shown[clamp(at < 0 ? 0 : at + by, 0, state.shown.length - 1)]);
  scrollToRank();
  speak(`rank ${state.trace.ranks[state.rank].rank}`);
}

function applyFilter() {
  const found = parseRanks(state.filter, state.trace.ranks), field = byId("ranks");
  field.setAttribute("aria-invalid", String(found === null));
  if (found === null) {
    byId("ranks-told").textContent = "write 0-3,8";
    return;
  }
  state.shown = found;
  byId("ranks-told").textContent = found.length === state.trace.ranks.length ? "" : `${found.length} of ${state.trace.ranks.length}`;
  if (found.length && !found.includes(state.rank)) state.rank = found[0];
}

// Bring controls, tables and pictures in line with what is chosen.
function refresh() {
  const { trace } = state, at = trace.numbers.indexOf(state.step);
  byId("step").value = byId("slider").value = String(at);
  byId("slider").setAttribute("aria-valuetext", `step ${state.step}`);
  byId("previous").disabled = at <= 0;
  byId("next").disabled = at >= trace.numbers.length - 1;
  byId("rank").value = String(state.rank);
  byId("lanes").value = state.lanes;
  const body = document.body.dataset;
  body.step = state.step;
  body.rank = trace.ranks.length ? trace.ranks[state.rank].rank : "";
  body.ranksShown = state.shown.length;
  byId("timeline").setAttribute("aria-label", `Timeline, step ${state.step}, ${plural(state.shown.length, "rank")}, rank ${body.rank} chosen`);
  bucketTable();
  draw();
  drawStrip();
  writeAddress();
}

function repaint() {
  pixels = Math.max(1, window.devicePixelRatio || 1);
  readTheme();
  const kinds = new Set(LEGEND.map(([kind]) => kind));
  if (!state.trace.hasOther) kinds.delete("other");
  if (state.trace.ranks.length < 2) kinds.delete("peers");
  drawLegend(kinds);
  paintSummary();
  draw();
  drawStrip();
}

const prefersDark = window.matchMedia("(prefers-color-scheme: dark)");
const isDark = () => (document.documentElement.dataset.theme || (prefersDark.matches ? "dark" : "light")) === "dark";
const nameTheme = () => { byId("theme").textContent = isDark() ? "Light" : "Dark"; };

function controls() {
  const { trace } = state;
  const named = (one) => (kindOf(trace, one) ? `${one}: ${kindOf(trace, one)}` : String(one));
  byId("step").append(...trace.numbers.map((one, i) => el("option", { value: i, text: named(one) })));
  byId("rank").append(...trace.ranks.map((rank, i) => el("option", { value: i, text: rank.rank })));
  byId("slider").max = Math.max(0, trace.numbers.length - 1);
  byId("ranks").value = state.filter;
  byId("keys-table").append(el("tbody", {}, ...KEYS.map(([, keys, what]) => el("tr", {}, el("th", { scope: "row" }, el("kbd", { text: keys })), el("td", { text: what })))));
  byId("words").append(...[...WORDS, ...(trace.byDevice ? [DEVICE_WORD] : [])].flatMap(([word, meaning]) => [el("dt", { text: word }), el("dd", { text: meaning })]));
  const on = (id, event, act) => byId(id).addEventListener(event, act);
  const moved = (act) => () => { act(); draw(); };
  on("step", "change", (event) => chooseStep(trace.numbers[Number(event.target.value)]));
  on("slider", "input", (event) => { if (trace.numbers.length) chooseStep(trace.numbers[Number(event.target.value)]); });
  on("previous", "click", () => chooseStepBy(-1));
  on("next", "click", () => chooseStepBy(1));
  on("rank", "change", (event) => { chooseRank(Number(event.target.value)); scrollToRank(); });
  on("ranks", "input", (event) => { state.filter = event.target.value; applyFilter(); refresh(); });
  on("lanes", "change", (event) => { state.lanes = event.target.value; refresh(); });
  on("zoom-in", "click", moved(() => zoom(1 / 1.5)));
  on("zoom-out", "click", moved(() => zoom(1.5)));
  on("fit", "click", moved(lookAtStep));
  on("whole", "click", moved(() => look(trace.begin, trace.end)));
  on("help", "click", () => byId("keys").showModal());
  on("keys-close", "click", () => byId("keys").close());
  on("strip", "click", (event) => {
    const wide = Math.min(48, event.target.clientWidth / trace.numbers.length);
    const at = Math.floor(event.offsetX / wide);
    if (at < trace.numbers.length) chooseStep(trace.numbers[at]);
  });
  on("theme", "click", () => {
    document.documentElement.dataset.theme = isDark() ? "light" : "dark";
    nameTheme();
    repaint();
    writeAddress();
  });
  prefersDark.addEventListener("change", () => { nameTheme(); repaint(); });
  window.addEventListener("resize", repaint);
  window.addEventListener("hashchange", () => { if (location.hash.includes("=")) { readAddress(); applyFilter(); lookAtStep(); refresh(); } });
}

// On paper everything is light.
function printing() {
  let before = "";
  window.addEventListener("beforeprint", () => {
    before = document.documentElement.dataset.theme || "";
    document.documentElement.dataset.theme = "light";
    repaint();
  });
  window.addEventListener("afterprint", () => {
    if (before) document.documentElement.dataset.theme = before;
    else delete document.documentElement.dataset.theme;
    repaint();
  });
}

function start() {
  const trace = (state.trace = readTrace(JSON.parse(byId("trace").textContent)));
  byId("trace").textContent = "";
  rowBuckets(trace);
  if (trace.numbers.length) state.step = trace.numbers[0];
  // The first step only learns: the second shows more.
  if (trace.numbers.length > 1 && !trace.ranks.some((rank) => rank.byNumber.get(state.step)?.ready.length)) state.step = trace.numbers[1];
  if (trace.ranks.length > 16) state.lanes = "compact";
  readAddress();
  applyFilter();
  controls();
  printing();
  nameTheme();
  facts(trace);
  warnings(trace);
  pixels = Math.max(1, window.devicePixelRatio || 1);
  readTheme();
  const sum = accounts(trace), late = stragglers(trace);
  paragraph(sum, late);
  figures(trace, sum, late);
  paintSummary = summaryBars(trace, sum);
  kindTable(trace);
  stragglerTable(trace, late);
  lookAtStep();
  listen();
  refresh();
  repaint();
}

document.body.dataset.errors = errors;
try {
  start();
} catch (error) {
  complain(error.message);
  throw error;
}
document.body.dataset.drawnMs = Math.round(performance.now());
