"use strict";

// Everything is readable without this script; it adds figures under the pointer.

const { charts, epochs } = JSON.parse(document.getElementById("data").textContent);
const SVG = "http://www.w3.org/2000/svg";

const place = (value, [low, high, log]) =>
  log ? Math.log(value / low) / Math.log(high / low) : (value - low) / (high - low);

const figure = (value) => {
  if (value === null) return "not finite";
  if (Number.isInteger(value) && Math.abs(value) < 1e6) return value.toLocaleString("en");
  const size = Math.abs(value);
  return size >= 1e-4 && size < 1e6 ? String(Number(value.toPrecision(4))) : value.toExponential(2);
};

const nearest = (sorted, wanted) => {
  let low = 0;
  let high = sorted.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (sorted[middle] <= wanted) low = middle;
    else high = middle;
  }
  return wanted - sorted[low] <= sorted[high] - wanted ? low : high;
};

const epochAt = (step) => {
  let found = null;
  for (const [first, epoch] of epochs) if (first <= step) found = epoch;
  return found;
};

const svg = (parent, name, kind) => {
  const made = document.createElementNS(SVG, name);
  made.setAttribute("class", kind);
  made.style.display = "none";
  return parent.appendChild(made);
};

const set = (element, attributes) => {
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.style.display = "";
};

const row = (line, at, step) => {
  const made = document.createElement("div");
  const mark = document.createElement("i");
  mark.className = line.name;
  const value = document.createElement("b");
  value.textContent = figure(line.y[at]);
  const where = line.x[at] === step ? "" : ` at ${line.x[at].toLocaleString("en")}`;
  made.append(mark, line.name + where, value);
  return made;
};

const follow = (card, chart) => {
  const plot = card.querySelector(".plot");
  const frame = plot.querySelector("svg");
  const tip = plot.querySelector(".tip");
  const cursor = svg(frame, "line", "cursor");
  const spots = chart.lines.map((line) => svg(frame, "circle", `spot ${line.name}`));
  const steps = [...new Set(chart.lines.flatMap((line) => line.x))].sort((a, b) => a - b);
  let at = steps.length - 1;

  const show = () => {
    const step = steps[at];
    const across = place(step, chart.x);
    set(cursor, { x1: `${across * 100}%`, x2: `${across * 100}%`, y1: "0", y2: "100%" });
    const title = document.createElement("p");
    const epoch = epochAt(step);
    title.textContent =
      `step ${step.toLocaleString("en")}` + (epoch === null ? "" : ` · epoch ${epoch + 1}`);
    tip.replaceChildren(title);
    chart.lines.forEach((line, i) => {
      const found = nearest(line.x, step);
      tip.append(row(line, found, step));
      if (line.y[found] === null) {
        spots[i].style.display = "none";
        return;
      }
      const x = place(line.x[found], chart.x) * 100;
      const y = (1 - place(line.y[found], chart.y)) * 100;
      set(spots[i], { cx: `${x}%`, cy: `${y}%`, r: 4.5 });
    });
    tip.hidden = false;
    const beside = across * plot.clientWidth + 14;
    const room = plot.clientWidth - tip.offsetWidth;
    tip.style.left = `${beside <= room ? beside : Math.max(0, beside - tip.offsetWidth - 28)}px`;
  };

  const hide = () => {
    tip.hidden = true;
    for (const drawn of [cursor, ...spots]) drawn.style.display = "none";
  };

  plot.addEventListener("pointermove", (event) => {
    const box = frame.getBoundingClientRect();
    const part = (event.clientX - box.left) / box.width;
    at = nearest(steps, chart.x[0] + part * (chart.x[1] - chart.x[0]));
    show();
  });
  plot.addEventListener("pointerleave", hide);
  card.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (move === undefined) return;
    event.preventDefault();
    at = Math.min(steps.length - 1, Math.max(0, at + move));
    show();
  });
  card.addEventListener("blur", hide);
};

document.querySelectorAll(".chart").forEach((card, i) => follow(card, charts[i]));

const theme = document.getElementById("theme");
theme.hidden = false;
theme.addEventListener("click", () => {
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  root.dataset.theme = (root.dataset.theme || system) === "dark" ? "light" : "dark";
});

const copy = document.getElementById("copy");
if (navigator.clipboard) {
  copy.hidden = false;
  copy.addEventListener("click", async () => {
    await navigator.clipboard.writeText(copy.parentElement.querySelector("pre").textContent);
    copy.textContent = "Copied";
    setTimeout(() => { copy.textContent = "Copy"; }, 1500);
  });
}
