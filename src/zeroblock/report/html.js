// Shows the numbers under the pointer, and copies commands. All text is set as text, never as markup.
"use strict";
const tip = document.getElementById("tip");
const format = (v) => (v === null ? "–" : Math.abs(v) >= 1e4 ? Math.round(v).toLocaleString("en") : String(+v.toPrecision(4)));

function show(event, title, rows) {
  tip.replaceChildren();
  tip.append(Object.assign(document.createElement("b"), { textContent: title }));
  for (const row of rows) tip.append(Object.assign(document.createElement("div"), { textContent: row }));
  tip.hidden = false;
  const x = event.clientX + 14 + tip.offsetWidth > innerWidth ? event.clientX - 14 - tip.offsetWidth : event.clientX + 14;
  tip.style.left = Math.max(4, x) + "px";
  tip.style.top = Math.max(4, Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 6)) + "px";
}

function inside(svg, event) {
  const at = svg.getBoundingClientRect(), box = svg.viewBox.baseVal;
  return [((event.clientX - at.left) / at.width) * box.width, ((event.clientY - at.top) / at.height) * box.height];
}

for (const svg of document.querySelectorAll("svg[data-lines]")) {
  const chart = JSON.parse(svg.dataset.lines), [left, right] = chart.box, cursor = svg.querySelector(".cursor");
  svg.addEventListener("pointermove", (event) => {
    const at = Math.min(Math.max((inside(svg, event)[0] - left) / (right - left), 0), 1);
    const x = chart.x[0] + at * (chart.x[1] - chart.x[0]);
    const near = chart.lines.map((line) => {
      let k = 0;
      line.x.forEach((v, i) => { if (Math.abs(v - x) < Math.abs(line.x[k] - x)) k = i; });
      return { line, k, gap: Math.abs(line.x[k] - x) };
    });
    const gap = Math.min(...near.map((n) => n.gap));
    const step = near.find((n) => n.gap === gap);
    const shown = step.line.x[step.k];
    const rows = near.map((n) => {
      const at = Math.round(n.line.x[n.k]) === Math.round(shown) ? "" : ` (step ${format(Math.round(n.line.x[n.k]))})`;
      return `${n.line.label}: ${format(n.line.y[n.k])}${chart.unit}${at}`;
    });
    cursor.setAttribute("transform", `translate(${left + ((shown - chart.x[0]) / (chart.x[1] - chart.x[0])) * (right - left)} 0)`);
    cursor.setAttribute("visibility", "visible");
    show(event, "step " + format(Math.round(shown)), rows);
  });
  svg.addEventListener("pointerleave", () => { tip.hidden = true; cursor.setAttribute("visibility", "hidden"); });
}

for (const svg of document.querySelectorAll("svg[data-cells]")) {
  const chart = JSON.parse(svg.dataset.cells), [left, right, height, width] = chart.box;
  const cells = new Map(chart.cells.map(([r, c, visits, rms]) => [r + "," + c, [visits, rms]]));
  svg.addEventListener("pointermove", (event) => {
    const [x, y] = inside(svg, event), r = Math.floor(y / height), c = Math.floor((x - left) / width);
    if (x < left || x >= right || c >= chart.edges.length - 1 || !(r in chart.rows)) { tip.hidden = true; return; }
    const [visits, rms] = cells.get(r + "," + c) || [0, null], a = chart.edges[c], b = chart.edges[c + 1] - 1;
    const steps = a >= b ? "step " + format(a) : `steps ${format(a)} to ${format(b)}`;
    show(event, chart.rows[r], [steps, visits === 0 ? "not active" : `active in ${visits} step${visits > 1 ? "s" : ""}`]
      .concat(rms === null ? [] : ["coefficient " + format(rms) + (visits > 1 ? " (rms)" : "")]));
  });
  svg.addEventListener("pointerleave", () => { tip.hidden = true; });
}

for (const button of document.querySelectorAll("button[data-copy]")) {
  button.addEventListener("click", async () => {
    const command = button.parentElement.querySelector("pre");
    try {
      await navigator.clipboard.writeText(command.textContent);
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(command);
      button.textContent = "Selected";
    }
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
}
