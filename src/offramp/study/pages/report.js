"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const find = (id) => document.getElementById(id);
const COLOURS = ["#2f6db3", "#d1495b", "#2d8a56", "#b8860b", "#7d5ba6", "#0f8b8d", "#e07a5f", "#5b6675", "#b5179e", "#6a994e",
  "#1d3557", "#9c6644", "#4361ee", "#bc4749"];
const names = [...new Set(data.entries.map((e) => e.name))].sort();
const colour = (name) => COLOURS[names.indexOf(name) % COLOURS.length];
const sets = [...new Set(data.entries.map((e) => e.set))];
const hidden = new Set();
let chosenSet = sets[0], sorted = { column: 0, up: true };

function make(kind, attributes = {}, ...children) {
  const svg = ["svg", "g", "line", "path", "circle", "text", "polyline"].includes(kind);
  const node = svg ? document.createElementNS("http" + "://www.w3.org/2000/svg", kind) : document.createElement(kind);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

function tip(text) { find("tip").textContent = text; find("tip").hidden = !text; }

function pressed(button, on) { button.setAttribute("aria-pressed", on); return button; }

function choices() {
  find("sets").replaceChildren(...sets.map((name) => {
    const button = pressed(make("button", {}, name), name === chosenSet);
    button.addEventListener("click", () => { chosenSet = name; draw(); });
    return button;
  }));
  const here = [...new Set(entries(true).map((e) => e.name))].sort();
  find("legend").replaceChildren(...here.map((name) => {
    const dot = make("i"); dot.style.background = colour(name);
    const button = pressed(make("button", {}, dot, name), !hidden.has(name));
    button.addEventListener("click", () => { hidden.has(name) ? hidden.delete(name) : hidden.add(name); draw(); });
    return button;
  }));
}

const entries = (all) => data.entries.filter((e) => e.set === chosenSet && (all || !hidden.has(e.name)));

function ticks(low, high, about) {
  const raw = (high - low) / about, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((f) => f * power).find((s) => s >= raw);
  const first = Math.ceil(low / step) * step, all = [];
  for (let value = first; value <= high + 1e-9; value += step) all.push(value);
  return all;
}

function chart(place, spots, lines, labels) {
  const W = 720, H = 380, L = 56, B = 46, T = 12, R = 14;
  if (!spots.length) { place.replaceChildren(make("p", { class: "soft" }, "nothing to draw")); return; }
  const xs = spots.map((s) => s.x), ys = spots.map((s) => s.y);
  const x0 = Math.min(0, ...xs), x1 = Math.max(labels.right || 0, ...xs) * 1.02;
  const best = Math.max(...ys), span = Math.max(best - Math.min(...ys), labels.least || 1);
  const y1 = best + 0.06 * span, y0 = Math.max(Math.min(...ys), best - 14 * (labels.least || 1)) - 0.06 * span;
  const X = (x) => L + (W - L - R) * (x - x0) / (x1 - x0 || 1), Y = (y) => T + (H - T - B) * (1 - (y - y0) / (y1 - y0 || 1));
  const svg = make("svg", { viewBox: `0 0 ${W} ${H}`, role: "group", "aria-label": labels.title });
  for (const x of ticks(x0, x1, 8)) svg.append(make("line", { class: "grid", x1: X(x), x2: X(x), y1: T, y2: H - B }),
    make("text", { x: X(x), y: H - B + 16, "text-anchor": "middle" }, String(Number(x.toPrecision(3)))));
  for (const y of ticks(y0, y1, 7)) svg.append(make("line", { class: "grid", x1: L, x2: W - R, y1: Y(y), y2: Y(y) }),
    make("text", { x: L - 6, y: Y(y) + 4, "text-anchor": "end" }, String(Number(y.toPrecision(4)))));
  svg.append(make("text", { x: (W + L) / 2, y: H - 8, "text-anchor": "middle" }, labels.x),
    make("text", { x: L + 6, y: T + 10 }, labels.y));
  for (const line of lines) svg.append(make("polyline", { fill: "none", stroke: line.colour, "stroke-opacity": 0.45,
    points: line.spots.filter((s) => s.y >= y0).map((s) => `${X(s.x)},${Y(s.y)}`).join(" ") }));
  let top = -Infinity;
  const front = [...spots].sort((a, b) => a.x - b.x || b.y - a.y).filter((s) => s.y > top && ((top = s.y), true));
  svg.append(make("path", { class: "front", d: front.filter((s) => s.y >= y0).map((s, i) => (i ? `H${X(s.x)}V` : `M${X(s.x)} `) + Y(s.y)).join("") }));
  for (const spot of spots.filter((s) => s.marked && s.y >= y0)) {
    const mark = make("g", { class: "mark", tabindex: 0, role: "img", "aria-label": spot.text },
      make("circle", { cx: X(spot.x), cy: Y(spot.y), r: spot.big ? 6 : 4, fill: spot.colour }));
    for (const [on, off] of [["mouseenter", "mouseleave"], ["focus", "blur"]]) {
      mark.addEventListener(on, () => tip(spot.text)); mark.addEventListener(off, () => tip(""));
    }
    svg.append(mark);
  }
  place.replaceChildren(svg);
}

function curves() {
  const spots = [], lines = [];
  for (const e of entries()) {
    const about = `${e.name}, ${e.model}, seed ${e.seed}`;
    const place = (s, marked, said) => ({ x: s.share, y: s.score, colour: colour(e.name), marked, big: said !== "",
      text: `${about}${said}: ${e.metric} ${s.score.toFixed(2)} at ${s.share.toFixed(3)} of the full MACs` });
    const all = e.curve.map((s) => place(s, e.curve.length < 4, ""));
    lines.push({ colour: colour(e.name), spots: all });
    spots.push(...all, place(e.full, true, ", full depth"),
      ...Object.entries(e.chosen).map(([loss, s]) => place(s, true, `, chosen for ≤ ${100 * loss} lost`)));
  }
  const metric = (entries(true)[0] || { metric: "" }).metric;
  chart(find("curves"), spots, lines, { x: "share of the full model's multiply-accumulates", y: metric, title: "metric against compute", right: 1 });
}

function times() {
  const rows = data.benches.filter((b) => b.set === chosenSet && b.metric !== null);
  const spots = rows.map((b) => ({ x: b.ms, y: b.metric, colour: colour(b.name), marked: true, big: true,
    text: `${b.name}, ${b.engine} ${b.precision}, batch ${b.batch}: ${b.metric.toFixed(2)} at ${b.ms.toFixed(3)} ms a row` }));
  if (spots.length) chart(find("times"), spots, [], { x: "measured milliseconds a row", y: "metric", title: "metric against time" });
  else find("times").replaceChildren();
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
    make("tbody", {}, ...rows.map((row) => make("tr", {}, ...row.cells.map((text) => make("td", {}, text))))));
}

function strips() {
  const rows = [], kept = [];
  for (const e of entries()) {
    const label = `${e.name}, seed ${e.seed}`;
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
  const none = () => make("p", { class: "soft" }, "no such measurement in these files");
  find("exits").replaceChildren(rows.length ? make("div", { class: "strips" }, ...rows) : none());
  find("kept").replaceChildren(kept.length ? make("div", { class: "strips" }, ...kept) : none());
}

function speed() {
  const rows = data.benches.filter((b) => b.set === chosenSet);
  if (!rows.length) { find("speed").replaceChildren(make("p", { class: "soft" }, "no bench file for this data set")); return; }
  const head = ["name", "engine", "precision", "batch", "budget", "rows a second", "ms a row", "share of MACs", "realised ÷ promised"];
  const body = rows.map((b) => [b.name, b.engine, b.precision, b.batch, b.budget ?? "–", b.rate.toFixed(1), b.ms.toFixed(3),
    b.share == null ? "–" : b.share.toFixed(3), b.realised == null ? "–" : b.realised.toFixed(2)]);
  find("speed").replaceChildren(make("div", { class: "scroll" }, make("table", {},
    make("thead", {}, make("tr", {}, ...head.map((t) => make("th", {}, t)))),
    make("tbody", {}, ...body.map((r) => make("tr", {}, ...r.map((t) => make("td", {}, String(t)))))))));
}

function sources() {
  const head = make("tr", {}, ...["file", "method", "seed", "command"].map((t) => make("th", {}, t)));
  find("sources").replaceChildren(make("thead", {}, head), make("tbody", {}, ...entries(true).flatMap((e) =>
    e.files.map((file) => make("tr", {}, ...[file, e.name, String(e.seed), e.command].map((t) => make("td", {}, t)))))));
}

function draw() { find("heading").textContent = chosenSet || "no results"; tip(""); choices(); curves(); times(); table(); strips(); speed(); sources(); }
find("about").textContent = data.about;
draw();
