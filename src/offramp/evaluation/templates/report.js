"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const find = (id) => document.getElementById(id);
// twelve colours that differ in hue or lightness on light and dark ground; the first six are for the methods shown at first
const COLOURS = ["#2f7fd0", "#d1495b", "#2d9a5f", "#c98a00", "#8f63c9", "#12a5a8", "#b5179e", "#7a8f00", "#e0703a", "#5566dd", "#9c6644", "#d95fa0"];
const HIGHLIGHTED = 6, GREY = "#98a1ac";
const sets = [...new Set(data.entries.map((e) => e.set))];
const dataOf = Object.fromEntries(data.entries.map((e) => [e.set, e.data]));
const cellsOf = (set) => data.entries.filter((e) => e.set === set).reduce((sum, e) => sum + e.cells, 0);
const chosenNames = {};  // data set → the methods that have a colour, in the order of the colours; null: a free colour
const isStudy = (name) => name.includes(": ");  // in a folder below a method, e.g. "auto: trec"
let chosenSet = [...sets].sort((a, b) => isStudy(a) - isStudy(b) || cellsOf(b) - cellsOf(a))[0], chosenBatch = null, sorted = { column: 0, up: true };

const pointsOf = (e) => [...e.curve, ...(e.full ? [e.full] : []), ...Object.values(e.chosen), ...Object.values(e.others)];

function paretoNames(set) {  // of scores that are better when they are lower, the negative is compared
  const own = data.entries.filter((e) => e.set === set), higher = own[0].higher_is_better;
  const all = own.flatMap((e) => pointsOf(e).map((s) => ({ share: s.share, score: higher ? s.score : -s.score, name: e.name })));
  let top = -Infinity;
  const front = all.sort((a, b) => a.share - b.share || b.score - a.score).filter((s) => s.score > top && ((top = s.score), true));
  const best = front.length ? front[front.length - 1].score : 0, counts = new Map();
  for (const s of front) counts.set(s.name, (counts.get(s.name) || 0) + 1 + (s.score > best - (higher ? 2 : -best / 50) ? 1000 : 0));
  return [...counts].sort((a, b) => b[1] - a[1]).slice(0, HIGHLIGHTED).map(([name]) => name);
}

const chosen = () => (chosenNames[chosenSet] ||= paretoNames(chosenSet));
const isChosen = (name) => chosen().includes(name);
const colour = (name) => isChosen(name) ? COLOURS[chosen().indexOf(name) % COLOURS.length] : GREY;

function toggle(name) {
  const list = chosen(), place = list.indexOf(name), free = list.indexOf(null);
  if (place >= 0) list[place] = null;
  else if (free >= 0) list[free] = name;
  else list.push(name);
  draw();
}

function make(kind, attributes = {}, ...children) {
  const svg = ["svg", "g", "line", "path", "circle", "text", "polyline"].includes(kind);
  const node = svg ? document.createElementNS("http" + "://www.w3.org/2000/svg", kind) : document.createElement(kind);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

function tip(text) { find("tip").textContent = text; find("tip").hidden = !text; }

function pressed(button, on) { button.setAttribute("aria-pressed", on); return button; }

function setButton(name) {
  const button = pressed(make("button", {}, name), name === chosenSet);
  button.addEventListener("click", () => { chosenSet = name; draw(); });
  return button;
}

function choices() {
  const studies = sets.some((name) => !isStudy(name)) ? sets.filter(isStudy) : [];
  const folded = make("details", {}, make("summary", {}, `${studies.length} tables of single studies`), ...studies.map(setButton));
  folded.open = find("sets").querySelector("details")?.open ?? studies.includes(chosenSet);
  find("sets").replaceChildren(...sets.filter((name) => !studies.includes(name)).map(setButton), ...(studies.length ? [folded] : []));
  const known = [...entries(true), ...timed(data.benches, true).filter((b) => !b.peer), ...timed(data.lengths, true)];
  const shown = [...new Set(known.map((e) => e.name))].sort((a, b) => isChosen(b) - isChosen(a) || (a < b ? -1 : 1));
  find("legend").replaceChildren(...shown.map((name) => {
    const dot = make("i"); dot.style.background = colour(name);
    const button = pressed(make("button", {}, dot, name), isChosen(name));
    button.addEventListener("click", () => toggle(name));
    return button;
  }));
}

const entries = (all) => data.entries.filter((e) => e.set === chosenSet && (all || isChosen(e.name)));
const timed = (rows, all) => rows.filter((r) => r.data === dataOf[chosenSet] && (all || r.peer || isChosen(r.name)));
const grouped = (rows, key) => Object.values(Object.groupBy ? Object.groupBy(rows, key)
  : rows.reduce((groups, row) => { (groups[key(row)] ||= []).push(row); return groups; }, {}));
const none = (text) => make("p", { class: "soft" }, text);

function ticks(low, high, about) {
  const raw = (high - low) / about, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((f) => f * power).find((s) => s >= raw);
  const first = Math.ceil(low / step) * step, all = [];
  for (let value = first; value <= high + 1e-9; value += step) all.push(value);
  return all;
}

function logTicks(low, high) {
  const all = [];
  for (let power = Math.floor(low); power <= high; power++)
    for (const factor of high - low > 2.2 ? [1] : high - low > 1.2 ? [1, 2, 5] : [1, 1.5, 2, 3, 4, 5, 7])
      if (Math.log10(factor) + power >= low && Math.log10(factor) + power <= high) all.push(factor * 10 ** power);
  return all;
}

function chart(element, points, lines, labels) {
  const W = 720, H = 380, L = 56, B = 46, T = 12, R = 14;
  if (!points.length) { element.replaceChildren(make("p", { class: "soft" }, "nothing to draw")); return; }
  const xs = points.map((s) => s.x), ys = points.map((s) => s.y), 
    least = Math.max(Math.min(...xs.filter((x) => x > 0)), labels.left || 0);  // what is cheaper stands at the left edge
  const scale = labels.log ? (x) => Math.log10(Math.max(x, least)) : (x) => x;
  const x0 = labels.log ? scale(least / 1.08) : Math.min(0, ...xs), x1 = labels.log ? scale(Math.max(...xs) * 1.05) : Math.max(...xs) * 1.02;
  const high = Math.max(...ys), low = Math.min(...ys), unit = labels.least || (labels.lower ? low / 100 : 1), span = Math.max(high - low, unit);
  const y1 = (labels.lower ? Math.min(high, low + 14 * unit) : high) + 0.06 * span;
  const y0 = labels.zero ? 0 : (labels.lower ? low : Math.max(low, high - 14 * unit)) - 0.06 * span;
  const fits = (s) => s.y >= y0 && s.y <= y1, up = labels.lower ? -1 : 1;
  const shown = labels.tick || ((x) => String(Number(x.toPrecision(3))));
  const X = (x) => L + (W - L - R) * (scale(x) - x0) / (x1 - x0 || 1), Y = (y) => T + (H - T - B) * (1 - (y - y0) / (y1 - y0 || 1));
  const svg = make("svg", { viewBox: `0 0 ${W} ${H}`, role: "group", "aria-label": labels.title });
  for (const x of labels.ticks || (labels.log ? logTicks(x0, x1) : ticks(x0, x1, 8))) svg.append(make("line", { class: "grid", x1: X(x), x2: X(x), y1: T, y2: H - B }),
    make("text", { x: X(x), y: H - B + 16, "text-anchor": "middle" }, shown(x)));
  for (const y of ticks(y0, y1, 7)) svg.append(make("line", { class: "grid", x1: L, x2: W - R, y1: Y(y), y2: Y(y) }),
    make("text", { x: L - 6, y: Y(y) + 4, "text-anchor": "end" }, String(Number(y.toPrecision(4)))));
  svg.append(make("text", { x: (W + L) / 2, y: H - 8, "text-anchor": "middle" }, labels.x),
    make("text", { x: L + 6, y: T + 10 }, labels.y));
  for (const line of lines) svg.append(make("polyline", { fill: "none", stroke: line.colour, "stroke-opacity": line.colour === GREY ? 0.28 : 0.7,
    points: line.points.filter(fits).map((s) => `${X(s.x)},${Y(s.y)}`).join(" ") }));
  let top = -Infinity;
  const front = [...points].sort((a, b) => a.x - b.x || up * (b.y - a.y)).filter((s) => up * s.y > top && ((top = up * s.y), true));
  if (!labels.zero) svg.append(make("path", { class: "front", d: front.filter(fits).map((s, i) => (i ? `H${X(s.x)}V` : `M${X(s.x)} `) + Y(s.y)).join("") }));
  for (const point of points.filter((s) => s.marked && fits(s))) {
    const mark = make("g", { class: "mark", tabindex: 0, role: "img", "aria-label": point.text },
      make("circle", { cx: X(point.x), cy: Y(point.y), r: point.big ? 6 : 4, fill: point.colour }));
    for (const [on, off] of [["mouseenter", "mouseleave"], ["focus", "blur"]]) {
      mark.addEventListener(on, () => tip(point.text)); mark.addEventListener(off, () => tip(""));
    }
    svg.append(mark);
  }
  element.replaceChildren(svg);
}

function curves() {
  const points = [], lines = [];
  for (const e of [...entries(true)].sort((a, b) => isChosen(a.name) - isChosen(b.name))) {
    const about = `${e.name}${e.variant ? ` (${e.variant})` : ""}, ${e.model}, seed ${e.seed}`, lit = isChosen(e.name);
    const point = (s, marked, label) => ({ x: s.share, y: s.score, colour: colour(e.name), marked: marked && lit, big: label !== "",
      text: `${about}${label}: ${e.metric} ${s.score.toFixed(2)} at ${s.share.toFixed(3)} of the full MACs` });
    const all = e.curve.map((s) => point(s, e.curve.length < 4, ""));
    lines.push({ colour: colour(e.name), points: all });
    points.push(...all, ...(e.full ? [point(e.full, true, ", full depth")] : []),
      ...Object.entries(e.chosen).map(([loss, s]) => point(s, true, `, chosen for a loss of ≤ ${100 * loss}`)),
      ...Object.entries(e.others).map(([setting, s]) => point(s, true, `, ${setting}`)));
  }
  const { metric, higher_is_better: higher } = entries(true)[0] || { metric: "", higher_is_better: true };
  chart(find("curves"), points, lines, { x: "share of the full model's multiply-accumulates (logarithmic)", y: metric, lower: !higher, title: "metric against compute", log: true, left: 0.01 });
}

const label = (b) => `${b.name}${b.peer ? "" : `, ${b.engine}`} ${b.precision}, ${b.model}, ${b.budget === null ? "static" : `budget ${b.budget}`}`
  + `, batch ${b.batch}${b.order ? `, rows ${b.order}` : ""}`;

function times() {
  const all = timed(data.benches, true).filter((b) => b.score !== null), sizes = [...new Set(all.map((b) => b.batch))].sort((a, b) => a - b);
  if (!sizes.includes(chosenBatch)) chosenBatch = sizes[0] ?? null;
  find("batches").replaceChildren(...sizes.map((size) => {
    const button = pressed(make("button", {}, `batch ${size}`), size === chosenBatch);
    button.addEventListener("click", () => { chosenBatch = size; times(); });
    return button;
  }));
  const point = (b) => ({ x: b.ms, y: b.score, colour: colour(b.name), marked: true, big: !b.peer,
    text: `${label(b)}: ${b.metric} ${b.score.toFixed(2)} at ${b.ms.toFixed(3)} ms a row (${b.file})` });
  const rows = timed(data.benches).filter((b) => b.score !== null && b.batch === chosenBatch);
  const lines = grouped(rows.filter((b) => !b.peer), (b) => [b.file, b.name, b.engine, b.precision, b.order].join()).map((own) => ({
    colour: colour(own[0].name), points: own.map(point).sort((a, b) => a.x - b.x) }));
  if (rows.length) chart(find("times"), rows.map(point), lines, { x: "measured milliseconds a row (logarithmic)", y: rows[0].metric, lower: !rows[0].higher_is_better, title: "metric against time", log: true });
  else find("times").replaceChildren(none(all.length ? "nothing chosen" : "no bench file for this data set"));
}

function against(id, rows, key, pointOf, labels) {
  if (!rows.length) { find(id).replaceChildren(none(labels.missing)); return; }
  const lines = grouped(rows, key).map((own) => ({ colour: colour(own[0].name), points: own.map(pointOf).sort((a, b) => a.x - b.x) }));
  const drawn = lines.filter((line) => new Set(line.points.map((s) => s.x)).size > 1);
  if (!drawn.length) { find(id).replaceChildren(none(labels.missing)); return; }
  const points = drawn.flatMap((line) => line.points), xs = [...new Set(points.map((s) => s.x))].sort((a, b) => a - b);
  chart(find(id), points, drawn, { ...labels, zero: true, ticks: xs.filter((x, i) => !i || x - xs[i - 1] > 0.3), tick: (x) => String(Math.round(2 ** x)) });
}

function speeds() {
  against("bybatch", timed(data.benches), (b) => [b.file, b.name, b.engine, b.precision, b.budget, b.order].join(),
    (b) => ({ x: Math.log2(b.batch), y: b.rate, colour: colour(b.name), marked: true, big: !b.peer,
      text: `${label(b)}: ${b.rate.toFixed(0)} rows a second (${b.file})` }),
    { x: "rows in a batch", y: "rows a second", title: "speed against batch size", missing: "no bench of several batch sizes for this data set" });
  const both = timed(data.lengths).flatMap((l) => [{ ...l, budget: "full", at: l.ms_full }, { ...l, budget: "as chosen", at: l.ms }]);
  against("bylength", both, (l) => [l.file, l.budget].join(),
    (l) => ({ x: Math.log2(l.mean_tokens), y: l.at, colour: colour(l.name), marked: true, big: l.budget !== "full",
      text: `${label(l)}: ${l.at.toFixed(3)} ms a row of ${l.mean_tokens.toFixed(0)} tokens (${l.file})` }),
    { x: "tokens of a row", y: "milliseconds a row", title: "time against length", missing: "no file of benchmarks/speed_by_length.py for this data set" });
}

function table() {
  const rows = data.lines.filter((l) => l.set === chosenSet);
  const number = (text) => { const found = text.match(/-?\d+(\.\d+)?/); return found ? Number(found[0]) : null; };
  const value = (row) => { const text = row.cells[sorted.column], n = sorted.column < 2 ? null : number(text); return n === null ? text : n; };
  rows.sort((a, b) => { const x = value(a), y = value(b);
    const order = typeof x === typeof y ? (x < y ? -1 : x > y ? 1 : 0) : (typeof x === "number" ? -1 : 1);
    return sorted.up ? order : -order; });
  const head = make("tr", {}, ...data.columns.map((name, i) => {
    const button = make("button", {}, name + (sorted.column === i ? (sorted.up ? " ▲" : " ▼") : ""));
    button.addEventListener("click", () => { sorted = { column: i, up: sorted.column === i ? !sorted.up : true }; table(); });
    return make("th", { "aria-sort": sorted.column === i ? (sorted.up ? "ascending" : "descending") : "none" }, button);
  }));
  find("table").replaceChildren(make("thead", {}, head),
    make("tbody", {}, ...rows.map((row) => make("tr", {}, named(row), ...row.cells.slice(1).map((text) => make("td", {}, text))))));
}

function named(row) {  // the method; what it was trained with opens below it
  const dot = make("i", { class: "dot" }); dot.style.background = colour(row.method);
  const name = row.variant ? row.cells[0].replace(` (${row.variant})`, "") : row.cells[0];
  if (!row.variant) return make("td", {}, dot, name);
  return make("td", {}, dot, name, make("details", {}, make("summary", {}, "options"), ...row.variant.split(", ").map((option) => make("div", {}, option))));
}

function strips() {
  const rows = [], kept = [];
  for (const e of entries()) {
    const label = `${e.name}${e.variant ? ` (${e.variant})` : ""}, seed ${e.seed}`;
    if (e.exits) {
      const total = Object.values(e.exits).reduce((a, b) => a + b, 0) || 1, strip = make("div", { class: "strip" });
      const layers = Object.keys(e.exits).map(Number).sort((a, b) => a - b), last = layers[layers.length - 1] || 1;
      for (const layer of layers) {
        const part = make("i", { title: `layer ${layer}: ${(100 * e.exits[layer] / total).toFixed(1)} % of rows` });
        part.style.width = 100 * e.exits[layer] / total + "%";
        part.style.background = `color-mix(in srgb, ${colour(e.name)} ${Math.round(25 + 75 * layer / last)}%, white)`;
        strip.append(part);
      }
      rows.push(make("span", { title: label }, label), strip);
    }
    if (e.kept) {
      const columns = make("div", { class: "columns" });
      e.kept.forEach((share, i) => { const bar = make("i", { title: `layer ${i + 1}: ${(100 * share).toFixed(1)} %` });
        bar.style.height = 100 * share + "%"; bar.style.background = colour(e.name); columns.append(bar); });
      kept.push(make("span", { title: label }, label), columns);
    }
  }
  const nothing = "no such measurement in these files";
  find("exits").replaceChildren(rows.length ? make("div", { class: "strips" }, ...rows) : none(nothing));
  find("kept").replaceChildren(kept.length ? make("div", { class: "strips" }, ...kept) : none(nothing));
}

function speed() {
  const rows = timed(data.benches);
  if (!rows.length) { find("speed").replaceChildren(none("no bench file for this data set")); return; }
  const head = ["name", "engine", "precision", "model", "batch", "row order", "budget", "rows a second", "ms a row", "share of MACs", "realised ÷ promised", "file"];
  const body = rows.map((b) => [b.name, b.engine, b.precision, b.model, b.batch, b.order ?? "–", b.budget ?? "–", b.rate.toFixed(1), b.ms.toFixed(3),
    b.share == null ? "–" : b.share.toFixed(3), b.realised == null ? "–" : b.realised.toFixed(2), b.file]);
  find("speed").replaceChildren(make("div", { class: "scroll" }, make("table", {},
    make("thead", {}, make("tr", {}, ...head.map((t) => make("th", {}, t)))),
    make("tbody", {}, ...body.map((r) => make("tr", {}, ...r.map((t) => make("td", {}, String(t)))))))));
}

function sources() {
  const head = make("tr", {}, ...["file", "method", "seed", "command"].map((t) => make("th", {}, t)));
  const trained = entries(true).flatMap((e) => e.files.map((file) => [file, e.variant ? `${e.name} (${e.variant})` : e.name, String(e.seed), e.command]));
  const measured = new Map([...timed(data.benches, true), ...timed(data.lengths, true)].filter((r) => !r.peer).map((r) => [r.file, [r.file, r.name, String(r.seed ?? "–"), r.command]]));
  find("sources").replaceChildren(make("thead", {}, head), make("tbody", {},
    ...[...trained, ...measured.values()].map((cells) => make("tr", {}, ...cells.map((t) => make("td", {}, t))))));
}

function draw() { find("heading").textContent = chosenSet || "no results"; tip(""); choices(); curves(); table(); strips(); times(); speeds(); speed(); sources(); }
find("about").textContent = data.about;
draw();
