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

function tokens(story, step) {
  const line = make("div", "tokens");
  const tags = !story.pieces && step.answer && step.answer.tags;
  let before = -1;
  (story.pieces || data.tokens).forEach((piece, i) => {
    const node = make("span", `token ${step.tokens[i]}${step.within.includes(i) ? " within" : ""}`, piece);
    node.title = { live: "computed", idle: "still seen by others, no longer computed", gone: "has left" }[step.tokens[i]];
    const word = data.words[i];
    if (tags && word >= 0 && word !== before && tags[word] !== "O") node.append(make("span", "tag", tags[word]));
    before = word;
    line.append(node);
  });
  return line;
}

function said(step) {
  const box = make("div", step.asked ? "" : "unasked");
  if (!step.answer) { box.append(make("span", "soft small", step.why || "no off-ramp here")); return box; }
  if (step.answer.scores) {
    const best = Object.entries(step.answer.scores).sort((a, b) => b[1] - a[1]).slice(0, MOST);
    for (const [name, share] of best) {
      const bar = make("div", "bar"), fill = make("i");
      fill.style.width = (100 * share).toFixed(1) + "%";
      const room = make("span"); room.append(fill);
      bar.append(make("span", "", name), room, make("span", "", share.toFixed(2)));
      box.append(bar);
    }
  } else {
    const told = Object.entries(step.answer).filter(([name]) => !["tags", "start", "end"].includes(name));
    box.append(make("span", "small", told.map(([name, value]) => name + ": " + (value === "" ? "none" : short(value))).join(", ")));
  }
  const why = step.why || (step.asked ? "" : "not asked");
  if (why) box.append(make("div", "why small soft", why));
  return box;
}

function draw(index) {
  const story = data.stories[index];
  find("asked").textContent = (100 * story.share).toFixed(1) + " %";
  find("budget").setAttribute("aria-valuetext", find("asked").textContent);
  find("layers").replaceChildren(...story.steps.map((step) => {
    const row = make("section", "layer");
    row.append(make("div", "number", step.layer), tokens(story, step), said(step));
    return row;
  }));
  const answer = story.answer.label !== undefined ? story.answer.label : short(story.answer.answer === "" ? "no answer" : story.answer.answer ?? story.answer.value ?? story.answer.text ??
    (story.answer.tags || []).join(" "));
  const gone = story.steps.length ? story.steps[story.steps.length - 1].tokens.filter((t) => t === "gone").length : 0;
  find("final").textContent = `${answer}: left after layer ${Number(story.exit_layer.toFixed(2))} of ${data.depth}` +
    (gone && !story.pieces ? `, ${gone} of ${data.tokens.length} tokens had left` : "") +
    `; ${(100 * story.share).toFixed(1)} % of ${(data.full_macs / 1e6).toFixed(1)} million multiply-accumulates`;
}

find("about").textContent = `${data.run}: ${data.method}, ${data.task}, ${data.depth} layers` +
  (data.cut ? `; ${data.cut} tokens did not fit and were not read` : "");
const slider = find("budget");
slider.max = data.stories.length - 1;
slider.value = data.chosen;
slider.addEventListener("input", () => draw(Number(slider.value)));
draw(data.chosen);
