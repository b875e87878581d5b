// Colours and hatchings. The colours are Okabe and Ito's, told apart by colour-blind people; every kind also has a
// pattern of its own, so that it is told apart on paper without colour.

const KIND_COLOURS = {
  data: "#e69f00",
  forward: "#56b4e9",
  backward: "#0072b2",
  bucket: "#009e73",
  wait: "#d55e00",
  optimizer: "#cc79a7",
  other: "#999999",
};
const DARK_ON = "#000000", LIGHT_ON = "#ffffff";
const inkOn = (kind) => (kind === "backward" ? LIGHT_ON : DARK_ON);

const theme = {}; // the page's own colours, read from its style
function readTheme() {
  const style = getComputedStyle(document.documentElement);
  for (const name of ["paper", "raised", "ink", "soft", "line", "band", "accent"]) {
    theme[name] = style.getPropertyValue(`--${name}`).trim();
  }
  patterns.clear();
}

const patterns = new Map();
let pixels = 1; // device pixels per CSS pixel

const STROKES = {
  data: (g, s) => { g.fillRect(s * 0.12, s * 0.12, s * 0.26, s * 0.26); g.fillRect(s * 0.62, s * 0.62, s * 0.26, s * 0.26); },
  wait: (g, s) => diagonal(g, s, 1),
  bucketWait: (g, s) => diagonal(g, s, 1),
  optimizer: (g, s) => { g.fillRect(0, s * 0.1, s, s * 0.2); g.fillRect(0, s * 0.6, s, s * 0.2); },
  other: (g, s) => { diagonal(g, s, 1); diagonal(g, s, -1); },
};

function diagonal(g, s, way) {
  g.beginPath();
  for (const shift of [-s, 0, s]) {
    g.moveTo(shift, way > 0 ? s : 0);
    g.lineTo(shift + s, way > 0 ? 0 : s);
  }
  g.stroke();
}

function fillFor(g, kind) {
  if (!(kind in STROKES)) return KIND_COLOURS[kind];
  if (!patterns.has(kind)) {
    const tile = document.createElement("canvas");
    const size = Math.max(4, Math.round(7 * pixels));
    tile.width = tile.height = size;
    const t = tile.getContext("2d");
    t.fillStyle = KIND_COLOURS[kind === "bucketWait" ? "bucket" : kind];
    t.fillRect(0, 0, size, size);
    const strong = kind === "wait" || kind === "bucketWait";
    t.fillStyle = t.strokeStyle = strong ? "rgba(255,255,255,0.8)" : "rgba(0,0,0,0.3)";
    t.lineWidth = size * (strong ? 0.28 : 0.16);
    STROKES[kind](t, size);
    patterns.set(kind, g.createPattern(tile, "repeat"));
  }
  // The canvas is scaled to device pixels, and a pattern is in them already.
  const pattern = patterns.get(kind);
  pattern.setTransform(new DOMMatrix().scale(1 / pixels));
  return pattern;
}

// A bar, at least half a pixel wide, with its text where there is room.
function bar(g, kind, x, y, width, height, text = "") {
  g.fillStyle = fillFor(g, kind);
  g.fillRect(x, y, Math.max(width, 0.5), height);
  if (!text || width < 18 || height < 9) return;
  const size = Math.min(11, height - 1);
  g.font = `${size}px ${FONT}`;
  const wide = g.measureText(text).width;
  if (wide + 8 > width) return;
  if (kind in STROKES) {
    g.fillStyle = KIND_COLOURS[kind === "bucketWait" ? "bucket" : kind];
    g.fillRect(x + 2, y + 1, wide + 6, height - 2);
  }
  g.fillStyle = inkOn(kind);
  g.textAlign = "left";
  g.textBaseline = "middle";
  g.fillText(text, x + 5, y + height / 2 + 0.5);
}

const FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", "DejaVu Sans", sans-serif';

// Size a canvas for this screen, and give a pen that counts in CSS pixels.
function pen(canvas, width, height) {
  const across = Math.max(1, Math.round(width * pixels)), down = Math.max(1, Math.round(height * pixels));
  if (canvas.width !== across || canvas.height !== down) {
    canvas.width = across;
    canvas.height = down;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }
  const g = canvas.getContext("2d");
  g.setTransform(pixels, 0, 0, pixels, 0, 0);
  return g;
}

const LEGEND = [
  ["data", "data: waiting for the next batch"],
  ["forward", "forward"],
  ["backward", "backward"],
  ["tick", "a gradient is ready"],
  ["queue", "bucket full, not yet launched"],
  ["peers", "launched, but not yet by all ranks"],
  ["bucket", "in flight"],
  ["bucketWait", "in flight and waited for: exposed"],
  ["wait", "waiting for the slowest rank"],
  ["optimizer", "optimizer"],
  ["other", "other"],
];

function swatch(kind) {
  const canvas = document.createElement("canvas");
  const g = pen(canvas, 26, 13);
  canvas.setAttribute("aria-hidden", "true");
  if (kind === "tick") {
    g.fillStyle = theme.ink;
    for (const x of [4, 8, 11, 17, 21]) g.fillRect(x, 1, 1, 11);
  } else if (kind === "queue") drawQueue(g, 2, 24, 1, 11);
  else if (kind === "peers") drawPeers(g, 0, 26, 1, 11);
  else bar(g, kind, 0, 0, 26, 13);
  return canvas;
}

// Full but not launched: a line from the time it filled to its launch, with a foot at the start.
function drawQueue(g, from, to, y, height) {
  g.fillStyle = KIND_COLOURS.bucket;
  g.fillRect(from, y + height / 2 - 0.75, Math.max(0.5, to - from), 1.5);
  g.fillRect(from, y + 1, 1.5, height - 2);
}

// Launched here, and waiting for other ranks to launch it: an empty frame.
function drawPeers(g, from, to, y, height) {
  if (to - from < 0.5) return;
  g.fillStyle = KIND_COLOURS.bucket;
  g.globalAlpha = height < 6 ? 0.3 : 0.18;
  g.fillRect(from, y, to - from, height);
  g.globalAlpha = 1;
  if (height < 6) return;
  g.fillRect(from, y, to - from, 1);
  g.fillRect(from, y + height - 1, to - from, 1);
}

function drawLegend(kinds) {
  byId("legend").replaceChildren(
    ...LEGEND.filter(([kind]) => kinds.has(kind)).map(([kind, text]) => el("li", {}, swatch(kind), el("span", { text }))),
  );
}
