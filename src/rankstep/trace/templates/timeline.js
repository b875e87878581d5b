// The timeline itself: lanes under each other for each rank, drawn only where they are in view.

const AXIS = 38; // height of the two rows above the lanes: steps, and time
const GAP = 8; // between ranks

const view = { width: 0, height: 0, gutter: 0, lanes: [], block: 0, hits: [], top: 0, chosen: null, hovered: null, drawn: 0 };

const xOf = (time) => view.gutter + ((time - state.left) / (state.right - state.left)) * (view.width - view.gutter);
const timeAt = (x) => state.left + ((x - view.gutter) / (view.width - view.gutter)) * (state.right - state.left);

// Buckets in flight at once get rows of their own, ten at most. Computed once a trace: the same bucket stays in its row.
function rowBuckets(trace) {
  let most = 1;
  for (const { steps } of trace.ranks) {
    for (const step of steps) {
      const ends = [];
      for (const bucket of step.buckets) {
        let row = ends.findIndex((end) => end <= bucket.launched);
        if (row < 0) row = ends.length < 10 ? ends.length : ends.indexOf(Math.min(...ends));
        ends[row] = bucket.finished;
        bucket.row = row;
      }
      most = Math.max(most, ends.length);
    }
  }
  trace.bucketRows = most;
  trace.hasOther = trace.ranks.some((rank) => rank.steps.some((step) => step.spans.some((s) => s.kind === "other")));
}

function layOut() {
  const narrow = view.width < 640;
  const rows = state.trace.bucketRows;
  const compact = state.lanes === "compact";
  const bucketHeight = compact ? Math.max(9, rows * 4) : rows === 1 ? 15 : rows * (rows > 4 ? 8 : 12);
  const spec =
    !compact
      ? [
          ["data", "data", "data", 15],
          ["forward", "forward", "fwd", 15],
          ["backward", "backward", "bwd", 23],
          ["bucket", "buckets", "bkt", bucketHeight],
          ["wait", "waits", "wait", 15],
          ["optimizer", "optimizer", "opt", 15],
          ...(state.trace.hasOther ? [["other", "other", "oth", 15]] : []),
        ]
      : [
          ["work", "work", "work", 21],
          ["bucket", "buckets", "bkt", bucketHeight],
        ];
  let top = 2;
  view.lanes = spec.map(([key, label, short, height]) => {
    const lane = { key, label: narrow ? short : label, top, height };
    top += height + 2;
    return lane;
  });
  view.block = top + GAP;
  view.gutter = narrow ? 72 : 128;
}

const laneOf = (kind) =>
  view.lanes.find((lane) => lane.key === kind || (lane.key === "work" && kind !== "bucket"));

// Put the canvas over the part of the ranks that is scrolled to, and draw that part.
function draw() {
  const scroller = byId("scroller"), canvas = byId("timeline");
  view.width = Math.max(280, scroller.clientWidth);
  layOut();
  const full = AXIS + view.block * state.shown.length + 4;
  view.height = Math.min(Math.max(full, AXIS + 60), Math.max(240, Math.round(window.innerHeight * 0.8)));
  scroller.style.height = `${view.height}px`;
  byId("extent").style.height = `${full}px`;
  view.top = scroller.scrollTop;
  const g = pen(canvas, view.width, view.height);
  view.hits = [];
  view.drawn = 0;
  g.fillStyle = theme.paper;
  g.fillRect(0, 0, view.width, view.height);
  drawRanks(g);
  drawAxis(g);
  if (!state.shown.length) {
    g.fillStyle = theme.soft;
    g.font = `13px ${FONT}`;
    g.textAlign = "left";
    g.fillText(state.trace.ranks.length ? "No rank is chosen." : "Nothing was recorded.", view.gutter + 12, AXIS + 30);
  }
  canvas.dataset.lanes = view.drawn;
  canvas.dataset.left = state.left;
  canvas.dataset.right = state.right;
  canvas.dataset.gutter = view.gutter;
  canvas.dataset.block = view.block;
  canvas.dataset.tops = view.lanes.map(({ key, top }) => `${key}:${top}`).join(" ");
}

function drawRanks(g) {
  const first = Math.max(0, Math.floor((view.top - GAP) / view.block));
  const last = Math.min(state.shown.length - 1, Math.floor((view.top + view.height - AXIS) / view.block));
  g.save();
  g.beginPath();
  g.rect(0, AXIS, view.width, view.height - AXIS);
  g.clip();
  const yOf = (place) => AXIS + place * view.block - view.top;
  g.fillStyle = theme.band;
  for (let place = first; place <= last; place++) {
    if (place % 2) g.fillRect(0, yOf(place) - GAP / 2 + 1, view.width, view.block);
  }
  drawGrid(g);
  for (let place = first; place <= last; place++) {
    drawRank(g, state.shown[place], yOf(place));
    view.drawn += view.lanes.length;
  }
  g.restore();
}

function drawRank(g, index, y) {
  const rank = state.trace.ranks[index];
  g.save();
  g.beginPath();
  g.rect(view.gutter, AXIS, view.width - view.gutter, view.height - AXIS);
  g.clip();
  g.fillStyle = theme.line;
  for (const lane of view.lanes) g.fillRect(view.gutter, y + lane.top + lane.height, view.width, 0.5);
  for (const step of rank.steps) {
    if (step.end < state.left || step.begin > state.right) continue;
    for (const span of step.spans) if (span.kind !== "wait") drawSpan(g, rank, step, span, y);
    for (const span of step.waits) drawSpan(g, rank, step, span, y);
    drawReady(g, rank, step, y);
    // Buckets may end after their step does, so those of the step before are drawn first.
    for (const bucket of step.buckets) drawBucket(g, rank, step, bucket, y);
  }
  g.restore();
  drawLabels(g, rank, index, y);
}

function drawLabels(g, rank, index, y) {
  if (index === state.rank) {
    g.fillStyle = theme.accent;
    g.fillRect(0, y, 4, view.block - GAP);
  }
  g.textBaseline = "middle";
  g.textAlign = "left";
  g.fillStyle = theme.ink;
  g.font = `600 12px ${FONT}`;
  g.fillText(view.width < 640 ? `r${rank.rank}` : `rank ${rank.rank}`, 10, y + view.lanes[0].top + 8);
  g.font = `11px ${FONT}`;
  g.fillStyle = theme.soft;
  g.textAlign = "right";
  for (const lane of view.lanes) g.fillText(lane.label, view.gutter - 8, y + lane.top + Math.min(lane.height, 16) / 2 + 0.5);
}

function hit(x, y, width, height, item) {
  const spare = Math.max(0, 3 - width) / 2;
  view.hits.push({ x: x - spare, y, width: width + 2 * spare, height, item });
  if (view.chosen && sameItem(view.chosen, item)) view.outline = { x, y, width, height };
}

const sameItem = (a, b) => a.type === b.type && a.step === b.step && (a.span || a.bucket || a.at) === (b.span || b.bucket || b.at);

function drawSpan(g, rank, step, span, y) {
  const lane = laneOf(span.kind);
  if (!lane || span.end < state.left || span.begin > state.right) return;
  const x = clamp(xOf(span.begin), view.gutter, view.width);
  const width = clamp(xOf(span.end), x, view.width + 4) - x;
  const height = lane.key === "backward" || lane.key === "work" ? 14 : lane.height - 1;
  if (span.kind === "wait") drawWait(g, step, span, y + lane.top, height);
  else bar(g, span.kind, x, y + lane.top, width, height, label(span.kind, span.end - span.begin, width));
  hit(x, y + lane.top, width, height, { type: "span", rank, step, span });
  outline(g);
}

// A wait in its parts: for the slowest rank, and the rest, which is exposed communication.
function drawWait(g, step, span, top, height) {
  const piece = (kind, word, begin, end) => {
    const from = clamp(xOf(begin), view.gutter, view.width), to = clamp(xOf(end), from, view.width + 4);
    if (to > from) bar(g, kind, from, top, to - from, height, label(word, end - begin, to - from));
  };
  let at = span.begin;
  for (const { begin, end } of beforeStarts(step)) {
    if (end <= at || begin >= span.end) continue;
    piece("bucketWait", "exposed", at, begin);
    at = Math.min(end, span.end);
    piece("wait", "waiting", Math.max(begin, span.begin), at);
  }
  piece("bucketWait", "exposed", at, span.end);
}

function label(word, length, width) {
  if (width > 95) return `${word} ${duration(length)}`;
  return width > 46 ? duration(length) : "";
}

// A tick for each gradient, under the bar of backward, and no more than one a pixel.
function drawReady(g, rank, step, y) {
  const lane = laneOf("backward");
  const times = step.ready;
  g.fillStyle = theme.ink;
  let before = -1;
  for (let i = 0; i < times.length; i++) {
    if (times[i] < state.left || times[i] > state.right) continue;
    const x = Math.round(xOf(times[i]) * pixels) / pixels;
    if (x !== before) g.fillRect(x, y + lane.top + 15, 1, lane.key === "work" ? 5 : 7);
    before = x;
  }
  if (!times.length) return;
  const x = xOf(times[0]), width = xOf(times[times.length - 1]) - x;
  hit(x - 3, y + lane.top + 14, width + 6, lane.height - 14, { type: "ready", rank, step, at: null });
  if (view.chosen?.type === "ready" && view.chosen.step === step) {
    view.outline = { x: xOf(times[view.chosen.at]) - 1, y: y + lane.top + 14, width: 3, height: lane.height - 14 };
    outline(g);
  }
}

function drawBucket(g, rank, step, bucket, y) {
  if (bucket.launched > state.right && (bucket.filled ?? bucket.launched) > state.right) return;
  const lane = laneOf("bucket"), rows = state.trace.bucketRows;
  const height = (lane.height - 1) / rows;
  const top = y + lane.top + height * bucket.row;
  const thick = Math.max(3, height - (rows > 1 ? 1 : 0));
  const at = (time) => clamp(xOf(time), view.gutter - 2, view.width + 2);
  const x = at(bucket.launched), start = at(bucket.start), end = at(bucket.finished);
  const from = clamp(at(bucket.waitBegin), start, end), until = clamp(at(bucket.waitEnd), from, end);
  const text = (width) => (width > 60 ? `bucket ${bucket.index}` : String(bucket.index));
  if (bucket.filled !== null && bucket.filled < bucket.launched) drawQueue(g, at(bucket.filled), x, top, thick);
  drawPeers(g, x, start, top, thick);
  if (from > start || end === start) bar(g, "bucket", start, top, from - start, thick, text(from - start));
  if (until > from) bar(g, "bucketWait", from, top, until - from, thick, from - start < 24 ? text(until - from) : "");
  if (end > until) bar(g, "bucket", until, top, end - until, thick);
  g.fillStyle = theme.ink;
  g.fillRect(x, top, 1, thick); // the launch
  hit(x, top, end - x, thick, { type: "bucket", rank, step, bucket });
  outline(g);
}

function outline(g) {
  if (!view.outline) return;
  const { x, y, width, height } = view.outline;
  g.strokeStyle = theme.ink;
  g.lineWidth = 2;
  g.strokeRect(x - 1, y - 1, width + 2, height + 2);
  view.outline = null;
}

// Time since the chosen step began: round numbers, as many as there is room for.
function ticks() {
  const zero = stepWindow(state.step).begin;
  const rough = (state.right - state.left) / Math.max(2, (view.width - view.gutter) / 75);
  const power = 10 ** Math.floor(Math.log10(rough));
  const gap = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough);
  const [unit, scale] = UNITS.find(([, ns]) => gap >= ns) || UNITS[3];
  const digits = Math.max(0, -Math.floor(Math.log10(gap / scale) + 1e-9));
  const out = [];
  for (let i = Math.ceil((state.left - zero) / gap); zero + i * gap <= state.right; i++) {
    out.push({ x: xOf(zero + i * gap), text: `${((i * gap) / scale).toFixed(digits).replace("-", "−")} ${unit}` });
  }
  return out;
}

function drawGrid(g) {
  g.fillStyle = theme.line;
  for (const { x } of ticks()) if (x > view.gutter) g.fillRect(x, AXIS, 1, view.height);
}

// Two rows: the steps, and the time.
function drawAxis(g) {
  g.fillStyle = theme.paper;
  g.fillRect(0, 0, view.width, AXIS);
  g.font = `11px ${FONT}`;
  g.textBaseline = "middle";
  drawStepNames(g);
  g.fillStyle = theme.soft;
  g.textAlign = "right";
  g.fillText("step", view.gutter - 8, 10.5);
  g.fillText("time", view.gutter - 8, AXIS - 11);
  g.textAlign = "center";
  for (const { x, text } of ticks()) {
    if (x < view.gutter) continue;
    g.fillStyle = theme.line;
    g.fillRect(x, AXIS - 5, 1, 5);
    g.fillStyle = theme.soft;
    if (x > view.gutter + 20 && x < view.width - 24) g.fillText(text, x, AXIS - 12);
  }
  g.fillStyle = theme.line;
  g.fillRect(0, AXIS - 1, view.width, 1);
  g.fillRect(view.gutter - 0.5, 0, 1, view.height);
}

function drawStepNames(g) {
  g.save();
  g.beginPath();
  g.rect(view.gutter, 0, view.width - view.gutter, AXIS);
  g.clip();
  const { numbers } = state.trace;
  numbers.forEach((number, i) => {
    const { begin, end } = stepWindow(number);
    const next = i + 1 < numbers.length ? stepWindow(numbers[i + 1]).begin : end;
    const until = Math.max(begin, Math.min(end, next));
    if (until < state.left || begin > state.right) return;
    const x = Math.max(view.gutter, xOf(begin)), width = Math.min(view.width, xOf(until)) - x;
    g.fillStyle = number === state.step ? theme.accent : i % 2 ? theme.band : theme.raised;
    g.fillRect(x, 2, Math.max(1, width - 1), 16);
    const kind = kindOf(state.trace, number);
    const texts = [kind ? `step ${number}: ${kind}` : `step ${number}`, `step ${number}`, String(number)];
    const text = texts.find((one, at) => g.measureText(one).width + (at < 2 ? 14 : 6) <= width);
    if (!text) return;
    g.textAlign = "left";
    g.fillStyle = number === state.step ? theme.paper : theme.ink;
    g.fillText(text, x + 5, 10.5);
  });
  g.restore();
}

// What lies under a place of the canvas: the topmost thing, or the nearest gradient.
function itemAt(x, y) {
  if (y < AXIS || x < view.gutter) return null;
  for (let i = view.hits.length - 1; i >= 0; i--) {
    const one = view.hits[i];
    if (x < one.x || x > one.x + one.width || y < one.y || y > one.y + one.height) continue;
    if (one.item.type !== "ready") return one.item;
    const times = one.item.step.ready, time = timeAt(x);
    let at = 0;
    for (let k = 1; k < times.length; k++) if (Math.abs(times[k] - time) < Math.abs(times[at] - time)) at = k;
    if (Math.abs(xOf(times[at]) - x) <= 4) return { ...one.item, at };
  }
  return null;
}

function rankAt(y) {
  const place = Math.floor((y - AXIS + view.top) / view.block);
  return y >= AXIS && place >= 0 && place < state.shown.length ? state.shown[place] : null;
}
