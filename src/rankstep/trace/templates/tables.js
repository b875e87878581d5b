// Everything around the timeline: summary, figures, tables.

const cell = (text, options = {}) => el("td", { ...options, text });
const number = (text) => el("td", { class: "number", text });

function head(...titles) {
  return el("thead", {}, el("tr", {}, ...titles.map(([text, unit, kind]) => {
    const th = el("th", { scope: "col", class: kind || null, text });
    if (unit) th.append(" ", el("span", { class: "unit", text: unit }));
    return th;
  })));
}

// A small bar beside a number; the number says it all, the bar is for the eye.
function meter(part, kind, text) {
  const fill = el("span", { class: `fill ${kind}` });
  fill.style.width = `${clamp(part * 100, part > 0 ? 1 : 0, 100)}%`;
  return el("td", { class: "meter" }, el("span", { class: "number", text }), el("span", { class: "track", "aria-hidden": true }, fill));
}

function facts(trace) {
  const hosts = [...new Set(trace.ranks.map((rank) => rank.host))];
  const devices = [...new Set(trace.ranks.map((rank) => rank.device.replace(/:\d+$/, "")))];
  const parts = [
    plural(trace.worldSize, "rank"),
    hosts.length === 1 ? null : plural(hosts.length, "host"),
    trace.numbers.length ? `step${trace.numbers.length > 1 ? "s" : ""} ${runs(trace.numbers)}` : "no steps",
    plural(trace.ranks.reduce((most, rank) => Math.max(most, rank.names.length), 0), "parameter"),
  ].filter(Boolean);
  const one = byId("facts");
  one.replaceChildren(...parts.map((text) => el("span", { class: "fact", text })));
  if (hosts.length === 1) one.append(el("span", { class: "fact" }, "on ", nameEl(hosts[0])));
  if (trace.byDevice) one.append(el("span", { class: "fact", text: "device times" }));
  if (trace.wrappers.length > 1) one.append(el("span", { class: "fact" }, `${trace.wrappers.length} wrappers: `, nameEl(trace.wrappers.join(", "))));
  for (const device of devices) one.append(el("span", { class: "fact" }, nameEl(device)));
}

function warnings(trace) {
  trace.notices.forEach(notice);
  const here = new Set(trace.ranks.map((rank) => rank.rank)), missing = [];
  for (let rank = 0; rank < trace.worldSize; rank++) if (!here.has(rank)) missing.push(rank);
  if (missing.length) notice(`Nothing was found of rank${missing.length > 1 ? "s" : ""} ${runs(missing)}; the rest is shown.`);
  const cut = trace.ranks.filter((rank) => !rank.complete).map((rank) => rank.rank);
  if (cut.length) notice(`The recording of rank${cut.length > 1 ? "s" : ""} ${runs(cut)} is cut off or lacks events.`);
  const unknown = trace.ranks.filter((rank) => rank.clockError === null).map((rank) => rank.rank);
  if (unknown.length && trace.ranks.length > 1) notice(`How exact the clock of rank${unknown.length > 1 ? "s" : ""} ${runs(unknown)} is, is not known: times of different ranks may not compare.`);
}

function figures(trace, sum, late) {
  const list = byId("figures");
  if (list.children.length || !sum.count) return;
  const first = late.rows[0], share = (key) => `${percent(sum[key], sum.length)} of a step`;
  const add = (label, value, note) => list.append(el("div", {}, el("dt", { text: label }), el("dd", { text: value }), el("dd", { class: "note", text: note })));
  add("Step", duration(sum.length), `mean of ${plural(trace.counted.length, "step")} on ${plural(trace.ranks.length, "rank")}`);
  add("Communication hidden", percent(sum.hidden, sum.hidden + sum.exposed), `${duration(sum.hidden)} of ${duration(sum.hidden + sum.exposed)} a step`);
  add("Exposed communication", duration(sum.exposed), share("exposed"));
  if (trace.worldSize > 1) add("Waiting for the slowest", duration(sum.waiting), share("waiting"));
  add("Waiting for data", duration(sum.data), share("data"));
  if (first?.count) add("Most often last", `rank ${first.rank.rank}`, `in ${first.count} of ${plural(late.judged, "step")}, by ${duration(first.late)}`);
}

const PHASE_WORDS = { data: "data loading", forward: "forward", backward: "backward", optimizer: "the optimizer step", other: "code outside model, loader and optimizer" };

function paragraph(sum, late) {
  const place = byId("paragraph");
  if (place.textContent.trim() || !sum.count) return;
  const first = late.rows[0], all = sum.hidden + sum.exposed;
  const parts = [`A step takes ${duration(sum.length)}: ${duration(sum.compute)} compute, ${duration(sum.exposed)} exposed communication, ${duration(sum.waiting)} waiting for the slowest rank, ${duration(sum.data)} waiting for data.`];
  if (all > 0) parts.push(`${percent(sum.hidden, all)} of the communication is hidden behind compute.`);
  if (first?.count) parts.push(`Rank ${first.rank.rank} is last in ${first.count} of ${plural(late.judged, "step")}, ${duration(first.late)} late on average, mostly in ${PHASE_WORDS[first.phase]}.`);
  place.textContent = parts.join(" ");
}

// One bar cut in parts, with each part's length and share below it.
function stacked(heading, parts, note) {
  const all = parts.reduce((sum, part) => sum + part.length, 0);
  const box = el("div", { class: "stacked" }, el("h3", { text: heading }));
  const canvas = el("canvas", { role: "img", "aria-label": parts.map((p) => `${p.word}: ${duration(p.length)}, ${percent(p.length, all)}`).join("; ") });
  const list = el("ul", { class: "legend" });
  for (const part of parts) list.append(el("li", { "data-part": part.word, "data-ns": part.length }, swatch(part.kind), el("span", { text: `${part.word} ` }), el("b", { text: duration(part.length) }), el("span", { text: ` ${percent(part.length, all)}` })));
  box.append(canvas, list);
  if (note) box.append(el("p", { class: "hint", text: note }));
  const paint = () => {
    const width = Math.max(120, box.clientWidth), g = pen(canvas, width, 22);
    let x = 0;
    g.clearRect(0, 0, width, 22);
    for (const part of parts) {
      const wide = all > 0 ? (part.length / all) * width : 0;
      if (part.length > 0) bar(g, part.kind, x, 0, Math.max(0.5, wide - 1), 22, wide > 70 ? percent(part.length, all) : "");
      x += wide;
    }
  };
  return { box, paint };
}

function summaryBars(trace, sum) {
  if (!sum.count) return () => {};
  const given = trace.overlap;
  const hidden = given ? given.hidden : sum.hidden, exposed = given ? given.exposed : sum.exposed;
  const note = given?.definition || "Hidden: a bucket that all ranks have launched is under way while this rank computes. Exposed: the rank waits for such a bucket. Overlap = hidden / (hidden + exposed).";
  const overlap = stacked(`Overlap: ${percent(hidden, hidden + exposed)} of communication is hidden`, [
    { kind: "bucket", word: "hidden", length: hidden },
    { kind: "bucketWait", word: "exposed", length: exposed },
  ], `${note} Mean of a rank's step.`);
  const words = { exposed: ["bucketWait", "exposed communication"], waiting: ["wait", "waiting for the slowest rank"] };
  const parts = stacked(`Where a step's ${duration(sum.length)} go`, PARTS.filter((key) => key !== "other" || sum.other > 0).map((key) => {
    const [kind, word] = words[key] || [key, key];
    return { kind, word, length: sum[key] };
  }), "Mean of all counted steps and ranks; the parts add up to the step.");
  byId("overlap").replaceChildren(overlap.box);
  byId("parts").replaceChildren(parts.box);
  return () => { overlap.paint(); parts.paint(); };
}

// The first and the last name beside the numbers, and all of them in a row of their own: folded on a screen, never on paper.
function namesCells(rank, { params, wrapper }, columns) {
  const names = params.map((param) => ownName(rank, param, wrapper));
  const row = el("tr", { class: "names-row", hidden: true }, el("td", { colspan: columns },
    el("ul", {}, ...names.map((name) => el("li", {}, nameEl(name))))));
  if (names.length <= 2) {
    const short = names.flatMap((name, i) => (i ? [", ", nameEl(name)] : [nameEl(name)]));
    return [el("td", { class: "names-cell" }, ...short), row];
  }
  const button = el("button", { type: "button", "aria-expanded": "false", text: plural(names.length, "name") });
  button.addEventListener("click", () => {
    row.hidden = !row.hidden;
    button.setAttribute("aria-expanded", String(!row.hidden));
  });
  return [el("td", { class: "names-cell" }, button, " ", el("span", { class: "ends" }, nameEl(names[0]), " … ", nameEl(names[names.length - 1]))), row];
}

function bucketTable() {
  const rank = state.trace.ranks[state.rank], step = rank?.byNumber.get(state.step);
  byId("buckets-step").textContent = state.trace.numbers.length ? state.step : "–";
  const told = byId("buckets-told"), table = byId("buckets");
  table.replaceChildren();
  if (!step) {
    told.textContent = rank ? `Rank ${rank.rank} recorded nothing of this step.` : "Nothing was recorded.";
    return;
  }
  const rows = bucketRows(rank, step), sum = account(step);
  const columns = ["fill", "delay", "peers", "flight", "exposed"].map((key) => column(rows.map((row) => row[key])));
  const { wrappers } = state.trace, several = wrappers.length > 1;
  told.textContent = `${duration(sum.length)} in all. Communication: ${duration(sum.hidden)} hidden, ${duration(sum.exposed)} exposed; ${duration(sum.waiting)} waiting for the slowest rank.` +
    (rows.length ? "" : " No bucket left in this step.");
  if (!rows.length) return;
  table.append(head(["Bucket", "", "number"], ...(several ? [["Of", ""]] : []), ["Size", "", "number"], ["Fill time", columns[0].unit, "number"], ["Launch delay", columns[1].unit, "number"], ["Peers", columns[2].unit, "number"], ["In flight", columns[3].unit, "number"], ["Exposed", columns[4].unit, "meter"], ["Left", ""], ["Parameters", "", "names-cell"]));
  const body = el("tbody");
  for (const row of rows) {
    const [short, full] = namesCells(rank, row, several ? 10 : 9);
    body.append(el("tr", {},
      el("th", { scope: "row", class: "number", text: row.bucket.index }),
      ...(several ? [el("td", { class: "of" }, nameEl(wrappers[row.wrapper]))] : []),
      number(row.nbytes === null ? "–" : bytes(row.nbytes)),
      number(columns[0].text(row.fill)),
      number(columns[1].text(row.delay)),
      number(columns[2].text(row.peers)),
      number((row.bucket.told ? "" : "≤ ") + columns[3].text(row.flight)),
      meter(row.flight > 0 ? row.exposed / row.flight : 0, "exposed", columns[4].text(row.exposed)),
      cell(row.bucket.inBackward ? "in backward" : "at its end", { class: "nowrap" }),
      short), full);
  }
  table.append(body);
}

function stragglerTable(trace, late) {
  const told = byId("stragglers-told"), table = byId("stragglers");
  if (!late.judged) {
    told.textContent = trace.ranks.length > 1 ? "No step has buckets of two ranks or more." : "It takes two ranks for one to be late.";
  } else {
    told.textContent = `Last: launches its last bucket after all the others. ${plural(late.judged, "step")} compared` +
      (late.unsure ? `; in ${late.unsure} of them by less than the clocks are exact, so it may have been another.` : ".");
  }
  if (!trace.ranks.length) return;
  const [mean_, worst] = ["late", "worst"].map((key) => column(late.rows.map((row) => row[key])));
  const most = Math.max(0, ...late.rows.map((row) => row.late || 0));
  table.append(head(["Rank", "", "number"], ["Last in", "steps", "meter"], ["Late by", `${mean_.unit}, mean`, "meter"], ["Worst", worst.unit, "number"], ["Mostly in", ""], ["Clock within", "", "number"], ["Device", ""], ["Host", ""]));
  const body = el("tbody");
  for (const row of late.rows) {
    body.append(el("tr", { "data-late": row.late ?? 0 },
      el("th", { scope: "row", class: "number", text: row.rank.rank }),
      meter(late.judged ? row.count / late.judged : 0, "backward", late.judged ? `${row.count} (${percent(row.count, late.judged)})` : "–"),
      meter(most ? (row.late || 0) / most : 0, "data", mean_.text(row.late)),
      number(worst.text(row.worst)),
      cell(row.phase || "–"),
      number(row.rank.clockError === null ? "unknown" : `± ${duration(row.rank.clockError)}`),
      el("td", { class: "place" }, nameEl(row.rank.device)),
      el("td", { class: "place" }, nameEl(row.rank.host))));
  }
  table.append(body);
}

// Steps of several kinds side by side: wrappers that take turns.
function kindTable(trace) {
  const all = kinds(trace), box = byId("kinds-box");
  box.hidden = all.length < 2;
  if (box.hidden) return;
  const keys = ["length", "compute", "exposed", "waiting", "data"];
  const columns = keys.map((key) => column(all.map(({ sum }) => sum[key])));
  const titles = ["Step", "Compute", "Exposed", "Waiting", "Data"];
  const body = el("tbody");
  for (const { kind, numbers, sum } of all) {
    body.append(el("tr", {},
      el("th", { scope: "row", class: "of" }, nameEl(kind)),
      number(numbers.length),
      ...keys.map((key, i) => number(columns[i].text(sum[key]))),
      meter(sum.hidden + sum.exposed > 0 ? sum.hidden / (sum.hidden + sum.exposed) : 0, "hidden", percent(sum.hidden, sum.hidden + sum.exposed))));
  }
  byId("kinds").replaceChildren(head(["Gradients of", ""], ["Steps", "", "number"], ...titles.map((title, i) => [title, columns[i].unit, "number"]), ["Hidden", "", "meter"]), body);
}

// One column a step, as long as its longest rank; a click chooses it.
function drawStrip() {
  const canvas = byId("strip"), { numbers, windows } = state.trace;
  const width = Math.max(200, canvas.parentElement.clientWidth), height = 64, g = pen(canvas, width, height);
  g.clearRect(0, 0, width, height);
  if (!numbers.length) return;
  const lengths = numbers.map((one) => windows.get(one).end - windows.get(one).begin), most = Math.max(...lengths, 1);
  const wide = Math.min(48, width / numbers.length);
  numbers.forEach((one, i) => {
    const tall = (lengths[i] / most) * (height - 18);
    const chosen = one === state.step;
    g.fillStyle = chosen ? theme.accent : theme.line;
    g.fillRect(i * wide, height - 16 - tall, Math.max(0.5, wide - (wide > 4 ? 2 : 0)), tall);
    if (wide >= 26 || chosen) {
      g.font = `${chosen ? "600 " : ""}11px ${FONT}`;
      g.fillStyle = chosen ? theme.ink : theme.soft;
      g.textAlign = "center";
      g.textBaseline = "middle";
      g.fillText(String(one), clamp(i * wide + wide / 2 - 1, 10, width - 10), height - 6);
    }
  });
  byId("strip-told").textContent = `From the first rank's begin to the last rank's end; the longest takes ${duration(most)}, step ${state.step} takes ${duration(lengths[numbers.indexOf(state.step)])}. `;
  byId("strip-told").append(el("span", { class: "screen", text: "Click to choose a step." }));
}
