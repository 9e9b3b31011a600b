"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const find = (id) => document.getElementById(id);
const MOST = 4;

function make(kind, name, text) {
  const node = document.createElement(kind);
  if (name) node.className = name;
  if (text !== undefined) node.textContent = text;
  return node;
}

function short(value) {
  if (typeof value === "number") return Number.isInteger(value) ? String(value) : value.toPrecision(4);
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}

function tokens(pass, step) {
  const line = make("div", "tokens");
  const tags = !pass.pieces && step.prediction && step.prediction.tags;
  let before = -1;
  (pass.pieces || data.tokens).forEach((piece, i) => {
    const node = make("span", `token ${step.token_states[i]}${step.answer_tokens.includes(i) ? " within" : ""}`, piece);
    node.title = { live: "computed", idle: "attended to, not computed any more", gone: "dropped" }[step.token_states[i]];
    const word = data.words[i];
    if (tags && word >= 0 && word !== before && tags[word] !== "O") node.append(make("span", "tag", tags[word]));
    before = word;
    line.append(node);
  });
  return line;
}

function exitCell(step) {
  const box = make("div", step.evaluated ? "" : "skipped");
  if (!step.prediction) { box.append(make("span", "soft small", step.reason || "no exit here")); return box; }
  if (step.prediction.scores) {
    const best = Object.entries(step.prediction.scores).sort((a, b) => b[1] - a[1]).slice(0, MOST);
    for (const [name, share] of best) {
      const bar = make("div", "bar"), fill = make("i");
      fill.style.width = (100 * share).toFixed(1) + "%";
      const track = make("span"); track.append(fill);
      bar.append(make("span", "", name), track, make("span", "", share.toFixed(2)));
      box.append(bar);
    }
  } else {
    const fields = Object.entries(step.prediction).filter(([name]) => !["tags", "start", "end"].includes(name));
    box.append(make("span", "small", fields.map(([name, value]) => name + ": " + (value === "" ? "none" : short(value))).join(", ")));
  }
  const reason = step.reason || (step.evaluated ? "" : "not evaluated");
  if (reason) box.append(make("div", "reason small soft", reason));
  return box;
}

function draw(index) {
  const pass = data.passes[index];
  find("spent").textContent = (100 * pass.share).toFixed(1) + " %";
  find("budget").setAttribute("aria-valuetext", find("spent").textContent);
  find("layers").replaceChildren(...pass.steps.map((step) => {
    const row = make("section", "layer");
    row.append(make("div", "number", step.layer), tokens(pass, step), exitCell(step));
    return row;
  }));
  const final = pass.prediction, given = final[data.answer];
  const answer = Array.isArray(given) ? given.join(final.tags ? " " : ", ") || "none"
    : final.answer === "" ? "no answer" : short(given);
  const gone = pass.steps.length ? pass.steps[pass.steps.length - 1].token_states.filter((t) => t === "gone").length : 0;
  find("final").textContent = `${answer}: exit after layer ${Number(pass.exit_layer.toFixed(2))} of ${data.depth}` +
    (gone && !pass.pieces ? `, ${gone} of ${data.tokens.length} tokens were dropped` : "") +
    `; ${(100 * pass.share).toFixed(1)} % of ${(data.full_macs / 1e6).toFixed(1)} million multiply-accumulates`;
}

find("about").textContent = `${data.run}: ${data.method}, ${data.task}, ${data.depth} layers` +
  (data.truncated ? `; ${data.truncated} tokens did not fit and were not read` : "");
const slider = find("budget");
slider.max = data.passes.length - 1;
slider.value = data.chosen;
slider.addEventListener("input", () => draw(Number(slider.value)));
draw(data.chosen);
