// Reads the packed trace. Times become nanoseconds since the first step began, on the clock of rank 0.

const KINDS = ["data", "forward", "backward", "wait", "optimizer", "other"];
const IN_BACKWARD = 1, FILLED = 2, FINISHED = 4;

const DIGIT = new Uint8Array(128);
[..."ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"].forEach((letter, i) => {
  DIGIT[letter.charCodeAt(0)] = i;
});

// Whole numbers of variable length, five bits a letter. Multiplied, not shifted: they may need more than 32 bits.
function readNumbers(text) {
  const out = [];
  let value = 0, scale = 1;
  for (let i = 0; i < text.length; i++) {
    const digit = DIGIT[text.charCodeAt(i)];
    value += (digit & 31) * scale;
    if (digit & 32) scale *= 32;
    else {
      out.push(value % 2 ? -(value - 1) / 2 : value / 2);
      value = 0;
      scale = 1;
    }
  }
  return out;
}

function sums(numbers, from = 0) {
  let sum = from;
  for (let i = 0; i < numbers.length; i++) numbers[i] = sum += numbers[i];
  return numbers;
}

function readSpans(text, begin) {
  const n = readNumbers(text), spans = [];
  for (let i = 0, at = begin; i < n.length; i += 3) {
    const span = { kind: KINDS[n[i]], begin: at + n[i + 1], end: at + n[i + 1] + n[i + 2] };
    spans.push(span);
    at = span.end;
  }
  return spans;
}

function readBuckets(text, begin) {
  const n = readNumbers(text), buckets = [];
  let launched = begin;
  for (let i = 0; i < n.length; i += 7) {
    launched += n[i + 2];
    const waitBegin = launched + n[i + 5];
    const told = Boolean(n[i + 1] & FINISHED);
    buckets.push({
      index: n[i],
      inBackward: Boolean(n[i + 1] & IN_BACKWARD),
      filled: n[i + 1] & FILLED ? launched - n[i + 3] : null,
      launched,
      told,
      start: launched, // when the last rank launched it, set when all ranks are read
      finished: told ? launched + n[i + 4] : waitBegin + n[i + 6],
      waitBegin,
      waitEnd: waitBegin + n[i + 6],
    });
  }
  return buckets;
}

class Step {
  constructor(packed, orders, kinds) {
    [this.wrappers, this.learns] = kinds[packed[7]];
    this.number = packed[0];
    this.begin = packed[1];
    this.end = packed[1] + packed[2];
    this.spans = readSpans(packed[3], this.begin);
    this.buckets = readBuckets(packed[6], this.begin);
    this.order = orders[packed[4]];
    this.packedTimes = packed[5];
    this.times = null;
  }
  // A big trace has a million gradients, and few of them are looked at: they are read when asked for.
  get ready() {
    return (this.times ||= sums(readNumbers(this.packedTimes), this.begin));
  }
  get params() {
    return this.order.params;
  }
  get waits() {
    return (this.waited ||= this.findWaits());
  }
  findWaits() {
    const spans = this.spans.filter((span) => span.kind === "wait");
    if (spans.length) return spans;
    return this.buckets
      .filter((bucket) => bucket.waitEnd > bucket.waitBegin)
      .map((bucket) => ({ kind: "wait", begin: bucket.waitBegin, end: bucket.waitEnd }));
  }
}

class Order {
  constructor(text) {
    this.text = text;
    this.list = null;
  }
  get params() {
    return (this.list ||= sums(readNumbers(this.text)));
  }
}

function readPlan(rows) {
  const buckets = new Map(), bucketOf = new Map();
  for (const [index, nbytes, params, wrapper] of rows) {
    const bucket = { index, nbytes, params: sums(readNumbers(params)), wrapper };
    buckets.set(index, bucket);
    for (const param of bucket.params) bucketOf.set(param, index);
  }
  return { buckets, bucketOf };
}

// A bucket starts when the last rank has launched it. Buckets are matched by index: plans are the same everywhere.
function findStarts(ranks) {
  const starts = new Map();
  for (const { steps } of ranks) {
    for (const step of steps) {
      if (!starts.has(step.number)) starts.set(step.number, new Map());
      const own = starts.get(step.number);
      for (const { index, launched } of step.buckets) own.set(index, Math.max(launched, own.get(index) ?? -Infinity));
    }
  }
  for (const { steps } of ranks) {
    for (const step of steps) {
      for (const bucket of step.buckets) {
        bucket.start = starts.get(step.number).get(bucket.index);
        bucket.finished = Math.max(bucket.start, bucket.finished);
      }
    }
  }
}

function readTrace(raw) {
  if (raw.format !== 2) throw new Error(`the trace has format ${raw.format}, and this page reads 2`);
  const orders = raw.orders.map((text) => new Order(text));
  const plans = raw.plans.map(readPlan);
  const ranks = raw.ranks.map((packed) => {
    const steps = packed.steps.map((step) => new Step(step, orders, raw.kinds));
    return {
      rank: packed.rank,
      host: packed.host,
      device: packed.device,
      clockError: packed.clock_error,
      complete: packed.complete,
      names: raw.names[packed.names],
      plan: plans[packed.plan],
      steps,
      byNumber: new Map(steps.map((step) => [step.number, step])),
    };
  });
  findStarts(ranks);
  // A step as all ranks saw it: from the first that began to the last that ended.
  const windows = new Map();
  for (const { steps } of ranks) {
    for (const step of steps) {
      const seen = windows.get(step.number) || { begin: Infinity, end: -Infinity };
      windows.set(step.number, { begin: Math.min(seen.begin, step.begin), end: Math.max(seen.end, step.end) });
    }
  }
  const numbers = [...windows.keys()].sort((a, b) => a - b);
  const all = [...windows.values()];
  // Means are of steps that all ranks have, and not of a wrapper's first, which only learns.
  const common = numbers.filter((number) => ranks.every((rank) => rank.byNumber.has(number)));
  const learned = common.filter((number) => !ranks.some((rank) => rank.byNumber.get(number).learns));
  const counted = learned.length ? learned : common;
  const wrappersOf = new Map(ranks.flatMap(({ steps }) => steps.map((step) => [step.number, step.wrappers])));
  return {
    wrappers: raw.wrappers,
    wrappersOf,
    byDevice: raw.by_device,
    notices: raw.notices,
    worldSize: raw.world_size,
    overlap: raw.overlap,
    ranks,
    numbers,
    counted: counted.length ? counted : numbers,
    windows,
    begin: all.length ? Math.min(...all.map((window) => window.begin)) : 0,
    end: all.length ? Math.max(...all.map((window) => window.end)) : 1e6,
  };
}

// Whose gradients a step reduced; nothing where there is one wrapper.
const kindOf = (trace, number) => (trace.wrappers.length > 1 ? (trace.wrappersOf.get(number) || []).map((at) => trace.wrappers[at]).join(" + ") : "");

// Without the name of its wrapper, where that stands beside it.
const ownName = (rank, param, wrapper) => {
  const { wrappers } = state.trace, name = nameOf(rank, param), before = `${wrappers[wrapper]}: `;
  return wrappers.length > 1 && name.startsWith(before) ? name.slice(before.length) : name;
};
const nameOf = (rank, param) => (param in rank.names ? rank.names[param] : `parameter ${param}`);
