"use strict";
const tip = document.getElementById("tip");
function show(event, lines) {
  tip.replaceChildren(...lines.map(parts => {
    const line = document.createElement("div");
    line.append(...parts.map(text => { const span = document.createElement("span"); span.textContent = text; return span; }));
    return line;
  }));
  const box = tip.getBoundingClientRect();
  tip.style.left = Math.min(event.clientX + 14, innerWidth - box.width - 8) + "px";
  tip.style.top = (event.clientY + box.height + 24 > innerHeight ? event.clientY - box.height - 10 : event.clientY + 16) + "px";
  tip.style.visibility = "visible";
}
function hide() { tip.style.visibility = "hidden"; }

function attachCharts(root) {
  for (const svg of root.querySelectorAll("svg.timeline")) {
    svg.addEventListener("pointermove", event => {
      const text = event.target.dataset.tip;
      text ? show(event, [[text]]) : hide();
    });
    svg.addEventListener("pointerleave", hide);
  }
  for (const svg of root.querySelectorAll("svg.chart")) {
    const series = JSON.parse(svg.dataset.chart);
    const cursor = document.createElementNS("http://www.w3.org/2000/svg", "line");
    cursor.setAttribute("class", "cursor");
    cursor.setAttribute("y1", 10);
    cursor.setAttribute("y2", svg.viewBox.baseVal.height - 26);
    svg.append(cursor);
    svg.addEventListener("pointermove", event => {
      const box = svg.getBoundingClientRect();
      const x = (event.clientX - box.left) / box.width * svg.viewBox.baseVal.width;
      const near = series.filter(s => s.points.length).map(s =>
        [s.label, s.points.reduce((a, b) => Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a)]);
      if (!near.length) return;
      const closest = near.map(n => n[1]).reduce((a, b) => Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a);
      cursor.setAttribute("x1", closest[0]);
      cursor.setAttribute("x2", closest[0]);
      cursor.style.visibility = "visible";
      show(event, [["step", String(closest[1])], ...near.filter(n => n[1][1] === closest[1]).map(n => [n[0], String(n[1][2])])]);
    });
    svg.addEventListener("pointerleave", () => { cursor.style.visibility = "hidden"; hide(); });
  }
}
