// What the page says about a trace, from its spans and buckets. The words are defined in WORDS, shown at the page's end.

const WORDS = [
  ["step", "One backward whose gradients are averaged, of whichever wrappers, with everything around it: from the end of the step before to its own end. Means are of the steps that all ranks recorded, without the first one of a wrapper, which only learns."],
  ["data", "Waiting for the next batch."],
  ["compute", "Forward, backward and optimizer, without what follows."],
  ["start", "A bucket starts when the last rank has launched it. Before that no rank can get anything back."],
  ["waiting", "What a rank waits for a bucket, at the end of backward, before the bucket has started: waiting for the slowest rank."],
  ["exposed", "What it waits after that: communication that nothing hides."],
  ["hidden", "The time in which at least one started bucket is under way while this rank computes. It is a part of compute; compute, exposed, waiting, data and other are the whole step."],
  ["overlap", "hidden / (hidden + exposed): how much of the communication costs no time."],
  ["fill time", "From the first gradient of a bucket to the moment when its last one lies in the buffer."],
  ["launch delay", "From then to the launch: buckets leave in order, and a full one waits for those before it."],
  ["peers", "From the launch on this rank to the launch on the last one."],
  ["in flight", "From then to the end. Where the backend does not tell the end (marked ≤), the end of the wait stands for it."],
  ["last", "The rank that launches its last bucket of a step after all the others."],
  ["late by", "How long after the median of the other ranks it does so."],
  ["mostly in", "Where it lost that time: the part of the step that took it longest in excess of the median of the others, between the waits of the step before and that launch."],
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

const COMPUTE = ["forward", "backward", "optimizer"];
const PARTS = ["data", ...COMPUTE, "exposed", "waiting", "other"];

// Stretches in which a rank waits for buckets that other ranks have yet to launch.
const beforeStarts = (step) => union(step.buckets.map((b) => ({ begin: b.waitBegin, end: Math.min(b.waitEnd, b.start) })));

// Where one rank's step went. The parts add up to the step; hidden lies inside compute.
function account(step) {
  const spent = {};
  for (const kind of KINDS) spent[kind] = 0;
  for (const span of step.spans) spent[span.kind] += span.end - span.begin;
  const flights = union(step.buckets.map((b) => ({ begin: b.start, end: b.finished })));
  spent.waiting = shared(union(step.waits), beforeStarts(step));
  spent.exposed = total(union(step.waits)) - spent.waiting;
  spent.hidden = shared(flights, union(step.spans.filter((span) => COMPUTE.includes(span.kind))));
  spent.length = step.end - step.begin;
  return spent;
}

const DEVICE_WORD = ["times", "Of the ranks' devices: when they got to the work that their hosts had queued, on the clock of the host. A gradient is placed between the marks around it. Data is waited for where the device had nothing to do meanwhile."];

// Steps that reduced the same wrappers, in the order in which they first come.
function kinds(trace) {
  const of = new Map();
  for (const number of trace.counted) {
    const kind = kindOf(trace, number);
    if (!of.has(kind)) of.set(kind, []);
    of.get(kind).push(number);
  }
  return [...of].map(([kind, numbers]) => ({ kind, numbers, sum: accounts(trace, numbers) }));
}

function accounts(trace, numbers = trace.counted) {
  const all = trace.ranks.flatMap((rank) => numbers.map((number) => rank.byNumber.get(number)).filter(Boolean).map(account));
  const sum = { count: all.length };
  for (const key of [...PARTS, "hidden", "length"]) sum[key] = mean(all.map((one) => one[key]));
  sum.compute = COMPUTE.reduce((so_far, kind) => so_far + sum[kind], 0);
  return sum;
}

function bucketRows(rank, step) {
  const firstReady = new Map();
  step.params.forEach((param, i) => {
    const index = rank.plan.bucketOf.get(param);
    if (index !== undefined && !firstReady.has(index)) firstReady.set(index, step.ready[i]);
  });
  return step.buckets.map((bucket) => {
    const info = rank.plan.buckets.get(bucket.index) || { nbytes: null, params: [], wrapper: 0 };
    const first = firstReady.get(bucket.index);
    return {
      bucket,
      nbytes: info.nbytes,
      params: info.params,
      wrapper: info.wrapper,
      fill: bucket.filled === null || first === undefined ? null : bucket.filled - first,
      delay: bucket.filled === null ? null : bucket.launched - bucket.filled,
      peers: bucket.start - bucket.launched,
      flight: bucket.finished - bucket.start,
      exposed: common(
        { begin: bucket.start, end: bucket.finished },
        { begin: bucket.waitBegin, end: bucket.waitEnd },
      ),
    };
  });
}

const PHASES = ["forward", "backward", "optimizer", "data", "other"];

// What a rank did between the waits of the step before, when all ranks stood side by side, and a moment of this step.
function phases(step, before, until) {
  const spans = [...step.spans];
  if (before) spans.unshift(...before.spans.slice(before.spans.findLastIndex((span) => span.kind === "wait") + 1));
  const spent = Object.fromEntries(PHASES.map((kind) => [kind, 0]));
  for (const span of spans) if (span.kind in spent) spent[span.kind] += Math.max(0, Math.min(span.end, until) - span.begin);
  return spent;
}

// Who launched its last bucket last in a step; null where there is nobody to compare with.
function lastOf(trace, number) {
  const arrived = [];
  for (const rank of trace.ranks) {
    const step = rank.byNumber.get(number);
    if (step?.buckets.length) arrived.push({ rank, step, at: step.buckets[step.buckets.length - 1].launched });
  }
  if (arrived.length < 2) return null;
  arrived.sort((a, b) => b.at - a.at || a.rank.rank - b.rank.rank);
  const [last, ...others] = arrived;
  // Times since the step before are compared, so all ranks need it or none.
  const side = trace.ranks.every((rank) => rank.byNumber.has(number - 1));
  const spent = (one) => phases(one.step, side ? one.rank.byNumber.get(number - 1) : null, one.at);
  const mine = spent(last), theirs = others.map(spent);
  let phase = null, most = -Infinity;
  for (const kind of PHASES) {
    const excess = mine[kind] - median(theirs.map((one) => one[kind]));
    if (excess > most) [phase, most] = [kind, excess];
  }
  const doubt = (last.rank.clockError ?? 0) + (others[0].rank.clockError ?? 0);
  return { rank: last.rank, late: last.at - median(others.map((one) => one.at)), phase, unsure: last.at - others[0].at <= doubt };
}

function stragglers(trace) {
  const rows = new Map(trace.ranks.map((rank) => [rank, { late: [], phases: new Map() }]));
  let judged = 0, unsure = 0;
  for (const number of trace.counted) {
    const last = lastOf(trace, number);
    if (!last) continue;
    const row = rows.get(last.rank);
    judged += 1;
    unsure += last.unsure;
    row.late.push(last.late);
    row.phases.set(last.phase, (row.phases.get(last.phase) || 0) + last.late);
  }
  const list = [...rows].map(([rank, { late, phases }]) => ({
    rank,
    count: late.length,
    late: late.length ? mean(late) : null,
    worst: late.length ? Math.max(...late) : null,
    phase: late.length ? [...phases].sort((a, b) => b[1] - a[1])[0][0] : null,
  }));
  list.sort((a, b) => b.count - a.count || (b.late || 0) - (a.late || 0) || a.rank.rank - b.rank.rank);
  return { rows: list, judged, unsure };
}
