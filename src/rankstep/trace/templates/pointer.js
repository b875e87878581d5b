// Mouse, touch and keys on the timeline; the tooltip, and the same words read out.

function describe(item) {
  const { rank, step } = item;
  const kind = kindOf(state.trace, step.number);
  const where = `rank ${rank.rank}, step ${step.number}${kind ? ` of ${kind}` : ""}`;
  const since = (time) => duration(time - step.begin);
  if (item.type === "span") {
    const { kind, begin, end } = item.span;
    if (kind === "wait") {
      const waiting = shared([item.span], beforeStarts(step));
      return {
        title: `wait for buckets: ${duration(end - begin)}`,
        lines: [where, `for the slowest rank: ${duration(waiting)}`, `exposed communication: ${duration(end - begin - waiting)}`, `from ${since(begin)} to ${since(end)} of the step`],
        names: [],
      };
    }
    return { title: `${kind}: ${duration(end - begin)}`, lines: [where, `from ${since(begin)} to ${since(end)} of the step`], names: [] };
  }
  if (item.type === "ready") {
    const param = step.params[item.at], bucket = rank.plan.bucketOf.get(param);
    const backward = step.spans.find((span) => span.kind === "backward");
    const lines = [where, `gradient ${item.at + 1} of ${step.ready.length}, at ${since(step.ready[item.at])} of the step`];
    if (backward) lines.push(`${duration(step.ready[item.at] - backward.begin)} after backward began`);
    if (bucket !== undefined) lines.push(`goes into bucket ${bucket}`);
    return { title: "gradient ready", lines, names: [nameOf(rank, param)] };
  }
  const row = bucketRows(rank, step).find((one) => one.bucket === item.bucket);
  const of = state.trace.wrappers.length > 1 ? ` of ${state.trace.wrappers[row.wrapper]}` : "";
  const lines = [where, `${row.nbytes === null ? "size unknown" : bytes(row.nbytes)}, ${plural(row.params.length, "parameter")}`];
  if (row.fill !== null) lines.push(`filled in ${duration(row.fill)}`);
  if (row.delay !== null) lines.push(`launched ${duration(row.delay)} after it was full`);
  lines.push(item.bucket.inBackward ? "left while backward went on" : "left at the end of backward");
  if (row.peers > 0) lines.push(`launched by all ranks ${duration(row.peers)} later`);
  lines.push(`exposed: ${duration(row.exposed)}`);
  if (!item.bucket.told) lines.push("end not told by the backend: the end of the wait is shown");
  return {
    title: `bucket ${item.bucket.index}${of}: ${item.bucket.told ? "" : "≤ "}${duration(row.flight)} in flight`,
    lines,
    names: row.params.map((param) => ownName(rank, param, row.wrapper)),
  };
}

function showTooltip(item, x, y) {
  const tip = byId("tooltip");
  if (!item) {
    tip.hidden = true;
    return;
  }
  const { title, lines, names } = describe(item);
  const listed = names.slice(0, 8).map((name) => el("li", {}, nameEl(name)));
  if (names.length > 8) listed.push(el("li", { text: `and ${names.length - 8} more` }));
  tip.replaceChildren(el("strong", { text: title }), ...lines.map((text) => el("div", { text })), el("ul", {}, ...listed));
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const left = x + 14 + width > window.innerWidth - 8 ? x - 14 - width : x + 14;
  const top = y + 14 + height > window.innerHeight - 8 ? y - 14 - height : y + 14;
  tip.style.left = `${clamp(left, 8, window.innerWidth - width - 8)}px`;
  tip.style.top = `${clamp(top, 8, window.innerHeight - height - 8)}px`;
}

function speak(text) {
  byId("spoken").textContent = text;
}

// Everything of the chosen rank and step in order of time, for those who go through it by key.
function itemsInOrder() {
  const rank = state.trace.ranks[state.rank], step = rank?.byNumber.get(state.step);
  if (!step) return [];
  const items = [
    ...step.spans.filter((span) => span.kind !== "wait").map((span) => ({ type: "span", rank, step, span, begin: span.begin })),
    ...step.waits.map((span) => ({ type: "span", rank, step, span, begin: span.begin })),
    ...step.buckets.map((bucket) => ({ type: "bucket", rank, step, bucket, begin: bucket.launched })),
  ];
  return items.sort((a, b) => a.begin - b.begin);
}

function gradientsInOrder() {
  const rank = state.trace.ranks[state.rank], step = rank?.byNumber.get(state.step);
  return step ? step.ready.map((begin, at) => ({ type: "ready", rank, step, at, begin })) : [];
}

function walk(items, by) {
  if (!items.length) return speak("Nothing was recorded here.");
  const now = view.chosen ? items.findIndex((item) => sameItem(item, view.chosen)) : -1;
  const at = now < 0 ? (by > 0 ? 0 : items.length - 1) : clamp(now + by, 0, items.length - 1);
  view.chosen = items[at];
  const { begin } = view.chosen, length = state.right - state.left;
  if (begin < state.left || begin > state.right) look(begin - length * 0.2, begin + length * 0.8);
  scrollToRank();
  draw();
  const { title, lines, names } = describe(view.chosen);
  speak([title, ...lines, ...names.slice(0, 8)].join(", "));
  const box = byId("timeline").getBoundingClientRect(), lane = laneOf(view.chosen.type === "span" ? view.chosen.span.kind : view.chosen.type === "ready" ? "backward" : "bucket");
  const y = AXIS + state.shown.indexOf(state.rank) * view.block - view.top + lane.top + lane.height;
  showTooltip(view.chosen, box.left + clamp(xOf(begin), view.gutter, view.width), box.top + y);
}

function scrollToRank() {
  const place = state.shown.indexOf(state.rank), scroller = byId("scroller");
  if (place < 0) return;
  const top = place * view.block, room = view.height - AXIS - view.block;
  if (scroller.scrollTop > top) scroller.scrollTop = top;
  else if (scroller.scrollTop < top - room) scroller.scrollTop = top - Math.max(0, room);
}

const KEYS = [
  [["ArrowLeft", "ArrowRight"], "← →", "move in time (with Shift: by a whole screen)", (event) => pan((event.key === "ArrowLeft" ? -1 : 1) * (event.shiftKey ? 1 : 0.15))],
  [["ArrowUp", "ArrowDown"], "↑ ↓", "choose a rank", (event) => chooseNeighbour(event.key === "ArrowUp" ? -1 : 1)],
  [["PageUp", "PageDown"], "Page ↑ ↓", "scroll the ranks", (event) => { byId("scroller").scrollTop += (event.key === "PageUp" ? -1 : 1) * (view.height - AXIS); }],
  [["+", "="], "+", "zoom in", () => zoom(1 / 1.5)],
  [["-", "_", "−"], "−", "zoom out", () => zoom(1.5)],
  [["0", "Home"], "0", "show the whole step", () => lookAtStep()],
  [["w", "W"], "w", "show the whole run", () => look(state.trace.begin, state.trace.end)],
  [["n", "]"], "n", "next step", () => chooseStepBy(1)],
  [["p", "["], "p", "previous step", () => chooseStepBy(-1)],
  [[".", ","], ". ,", "next and previous span or bucket, read out", (event) => walk(itemsInOrder(), event.key === "." ? 1 : -1)],
  [["g", "G"], "g G", "next and previous gradient, read out", (event) => walk(gradientsInOrder(), event.key === "g" ? 1 : -1)],
  [["Escape"], "Esc", "close the tooltip", () => { view.chosen = null; showTooltip(null); }],
];

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || !state.trace) return;
  const typing = event.target.matches?.("input, select, textarea");
  if (event.key === "?" && !typing) {
    event.preventDefault();
    byId("keys").showModal();
    return;
  }
  if (event.target !== byId("timeline")) return;
  const found = KEYS.find(([keys]) => keys.includes(event.key));
  if (!found) return;
  event.preventDefault();
  found[3](event);
  draw();
}

function listen() {
  const canvas = byId("timeline"), scroller = byId("scroller");
  let drag = null, asked = false;
  const redraw = () => {
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => { asked = false; draw(); });
  };
  const place = (event) => {
    const box = canvas.getBoundingClientRect();
    return { x: event.clientX - box.left, y: event.clientY - box.top };
  };
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    const { x, y } = place(event);
    drag = { x, y, left: state.left, right: state.right, top: scroller.scrollTop, moved: false };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    const { x, y } = place(event);
    if (drag) {
      drag.moved ||= Math.hypot(x - drag.x, y - drag.y) > 3;
      if (!drag.moved) return;
      const by = ((drag.x - x) / (view.width - view.gutter)) * (drag.right - drag.left);
      look(drag.left + by, drag.right + by);
      if (event.pointerType === "mouse") scroller.scrollTop = drag.top + drag.y - y;
      showTooltip(null);
      canvas.classList.add("dragging");
      redraw();
      return;
    }
    view.chosen = null;
    showTooltip(itemAt(x, y), event.clientX, event.clientY);
  });
  const release = (event) => {
    if (drag && !drag.moved && event.type === "pointerup") {
      const { x, y } = place(event);
      clicked(x, y);
      if (event.pointerType !== "mouse") showTooltip(itemAt(x, y), event.clientX, event.clientY);
    }
    drag = null;
    canvas.classList.remove("dragging");
  };
  canvas.addEventListener("pointerup", release);
  canvas.addEventListener("pointercancel", release);
  canvas.addEventListener("pointerleave", () => { if (!view.chosen) showTooltip(null); });
  canvas.addEventListener("blur", () => { view.chosen = null; showTooltip(null); redraw(); });
  canvas.addEventListener("dblclick", () => { lookAtStep(); redraw(); });
  canvas.addEventListener("wheel", (event) => {
    const sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY);
    const wanted = event.ctrlKey || event.metaKey || (document.activeElement === canvas && !event.shiftKey && place(event).x > view.gutter);
    if (!sideways && !wanted) return;
    event.preventDefault();
    if (sideways) pan(event.deltaX / (view.width - view.gutter));
    else zoom(Math.exp(clamp(event.deltaY, -240, 240) * 0.0025), timeAt(Math.max(view.gutter, place(event).x)));
    showTooltip(null);
    redraw();
  }, { passive: false });
  scroller.addEventListener("scroll", redraw);
  document.addEventListener("keydown", onKey);
  new ResizeObserver(redraw).observe(scroller);
  window.addEventListener("resize", redraw);
}

// A click chooses the rank, and in the row of steps the step.
function clicked(x, y) {
  byId("timeline").focus({ preventScroll: true });
  if (y < 19 && x > view.gutter) {
    const time = timeAt(x);
    const number = [...state.trace.numbers].reverse().find((one) => stepWindow(one).begin <= time);
    if (number !== undefined) chooseStep(number, false);
    return;
  }
  const index = rankAt(y);
  if (index !== null) chooseRank(index);
  const item = itemAt(x, y);
  if (item && item.step.number !== state.step) chooseStep(item.step.number, false);
}
