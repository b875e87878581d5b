// What the page says about a trace, from its spans and buckets. The words are defined in WORDS, shown at the page's end.

const WORDS = [
  ["step", "One backward whose gradients are averaged, with everything around it: from the end of the step before to its own end."],
  ["in flight", "A bucket is in flight from the launch of its all-reduce on a rank to the end. Where the backend does not tell the end (marked ≤), the end of the wait stands for it, and so the time in flight may be shorter than shown."],
  ["exposed", "The time in which at least one bucket is in flight and the rank does nothing but wait."],
  ["hidden", "The rest of the time in which at least one bucket is in flight: the rank works meanwhile."],
  ["overlap", "Hidden time as a part of all the time in flight, summed over steps and ranks."],
  ["fill time", "From the first gradient of a bucket to the moment when its last one lies in the buffer."],
  ["launch delay", "From then to the launch: buckets leave in order, and a full one waits for those before it."],
  ["last", "In each step, the rank that launches its last bucket after all the others. If the second is nearer to it than their clocks are exact, nobody is called last."],
  ["late by", "How long after the median of the other ranks the last rank launches its last bucket."],
  ["because of", "The part of the step that took the last rank longest in excess of the median of the others, before that launch."],
];

// Disjoint stretches, in order, that cover the same as the given ones.
function union(stretches) {
  const sorted = stretches.filter((s) => s.end > s.begin).sort((a, b) => a.begin - b.begin);
  const out = [];
  for (const { begin, end } of sorted) {
    const last = out[out.length - 1];
    if (last && begin <= last.end) last.end = Math.max(last.end, end);
    else out.push({ begin, end });
  }
  return out;
}

const total = (stretches) => stretches.reduce((sum, s) => sum + s.end - s.begin, 0);
const common = (a, b) => Math.max(0, Math.min(a.end, b.end) - Math.max(a.begin, b.begin));

function shared(a, b) {
  let sum = 0;
  for (let i = 0, j = 0; i < a.length && j < b.length; ) {
    sum += common(a[i], b[j]);
    if (a[i].end < b[j].end) i += 1;
    else j += 1;
  }
  return sum;
}

// Time in flight of one rank in one step, hidden and exposed, and where the step went.
function account(step) {
  const waits = union(step.waits);
  const flight = union(step.buckets.map((b) => ({ begin: b.launched, end: b.finished })));
  const exposed = shared(flight, waits);
  const parts = {};
  for (const kind of KINDS) parts[kind] = 0;
  for (const span of step.spans) parts[span.kind] += span.end - span.begin;
  return { length: step.end - step.begin, hidden: total(flight) - exposed, exposed, parts };
}

function accounts(trace) {
  const all = trace.ranks.flatMap((rank) => rank.steps.map(account));
  const parts = {};
  for (const kind of KINDS) parts[kind] = mean(all.map((one) => one.parts[kind]));
  return {
    count: all.length,
    length: mean(all.map((one) => one.length)),
    median: median(all.map((one) => one.length)),
    hidden: mean(all.map((one) => one.hidden)),
    exposed: mean(all.map((one) => one.exposed)),
    parts,
  };
}

function bucketRows(rank, step) {
  const firstReady = new Map();
  step.params.forEach((param, i) => {
    const index = rank.plan.bucketOf.get(param);
    if (index !== undefined && !firstReady.has(index)) firstReady.set(index, step.ready[i]);
  });
  return step.buckets.map((bucket) => {
    const info = rank.plan.buckets.get(bucket.index) || { nbytes: null, params: [] };
    const first = firstReady.get(bucket.index);
    return {
      bucket,
      nbytes: info.nbytes,
      params: info.params,
      fill: bucket.filled === null || first === undefined ? null : bucket.filled - first,
      delay: bucket.filled === null ? null : bucket.launched - bucket.filled,
      flight: bucket.finished - bucket.launched,
      exposed: common(
        { begin: bucket.launched, end: bucket.finished },
        { begin: bucket.waitBegin, end: bucket.waitEnd },
      ),
    };
  });
}

const CAUSES = { start: "starting late", data: "data", forward: "forward", backward: "backward", other: "other work", optimizer: "optimizer" };

function causes(step, window, until) {
  const out = { start: step.begin - window.begin };
  for (const kind of ["data", "forward", "backward", "other", "optimizer"]) {
    out[kind] = step.spans
      .filter((span) => span.kind === kind)
      .reduce((sum, span) => sum + Math.max(0, Math.min(span.end, until) - span.begin), 0);
  }
  return out;
}

// Who launched its last bucket last, step by step; null where the clocks cannot tell.
function lastOf(trace, number) {
  const arrivals = [];
  for (const rank of trace.ranks) {
    const step = rank.byNumber.get(number);
    if (step && step.buckets.length) arrivals.push({ rank, step, at: Math.max(...step.buckets.map((b) => b.launched)) });
  }
  if (arrivals.length < 2) return null;
  arrivals.sort((a, b) => b.at - a.at);
  const [last, second, ...rest] = arrivals;
  if (last.at - second.at <= (last.rank.clockError || 0) + (second.rank.clockError || 0)) return { undecided: true };
  const others = [second, ...rest];
  const window = trace.windows.get(number);
  const mine = causes(last.step, window, last.at);
  const theirs = others.map((one) => causes(one.step, window, one.at));
  const excess = Object.keys(mine).map((key) => [key, mine[key] - median(theirs.map((one) => one[key]))]);
  excess.sort((a, b) => b[1] - a[1]);
  return { rank: last.rank, late: last.at - median(others.map((one) => one.at)), cause: excess[0][0] };
}

function stragglers(trace) {
  const rows = new Map(trace.ranks.map((rank) => [rank, { rank, late: [], causes: new Map() }]));
  let judged = 0, undecided = 0;
  for (const number of trace.numbers) {
    const last = lastOf(trace, number);
    if (last === null) continue;
    judged += 1;
    if (last.undecided) undecided += 1;
    else {
      const row = rows.get(last.rank);
      row.late.push(last.late);
      row.causes.set(last.cause, (row.causes.get(last.cause) || 0) + 1);
    }
  }
  const list = [...rows.values()].map((row) => ({
    rank: row.rank,
    count: row.late.length,
    late: row.late.length ? mean(row.late) : null,
    worst: row.late.length ? Math.max(...row.late) : null,
    cause: row.late.length ? CAUSES[[...row.causes].sort((a, b) => b[1] - a[1])[0][0]] : null,
  }));
  list.sort((a, b) => b.count - a.count || (b.late || 0) - (a.late || 0) || a.rank.rank - b.rank.rank);
  return { rows: list, judged, undecided };
}
