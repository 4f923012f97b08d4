"use strict";  // for all the files that page.py joins to the page's one script
// Draws figures from the numbers in #data: how any is drawn, and the plain ones of a benchmark.
// Text from the data goes in as text: textContent, or `plain` for plotly.

const data = JSON.parse(document.getElementById("data").textContent);
const element = (id) => document.getElementById(id);
const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
const range = (start, end) => Array.from({ length: Math.max(0, end - start) }, (_, i) => start + i);
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// About how many lines the legend takes; where it is narrow, a line a method.
function legendLines(panels, width) {
  const names = new Set(panels.flatMap((panel) => panel.traces.map((trace) => trace.name).filter(Boolean)));
  if (width < 560) return names.size;
  let lines = 1, used = 0;
  for (const name of names) {
    const wide = 60 + 7 * name.length;
    if (used && used + wide > width) { lines += 1; used = 0; }
    used += wide;
  }
  return lines;
}

// Figures: one or several panels, side by side where there is room.

// One or several panels, side by side where there is room.
function draw(id, panels, options = {}) {
  const plot = element(id).querySelector(".plot");
  element(id).querySelector(".tools").hidden = !panels.length;
  if (!panels.length) {
    if (plot.data) Plotly.purge(plot);
    const message = document.createElement("p");
    message.textContent = "There is nothing to show for this choice.";
    plot.replaceChildren(message);
    return;
  }
  if (!plot.data) plot.replaceChildren();
  const width = plot.clientWidth, columns = width < 620 ? 1 : panels.length, rows = Math.ceil(panels.length / columns);
  const ink = colour("--ink"), line = colour("--line"), legend = options.legend !== false;
  const lines = legend ? legendLines(panels, width - 64) : 0;
  const margin = { l: 52, r: options.bar ? 70 : 12, t: options.top ?? 30, b: (options.bottom ?? 56) + 20 * lines };
  const gap = margin.t + margin.b - 20 * lines, inner = rows * (options.height ?? 250) + (rows - 1) * gap, height = inner + margin.t + margin.b;
  const layout = {
    width, height, paper_bgcolor: colour("--paper"), plot_bgcolor: options.blank ? colour("--blank") : colour("--paper"),
    font: { color: ink, size: 12, family: getComputedStyle(document.body).fontFamily },
    margin, dragmode: false, hovermode: "closest",
    showlegend: legend,
    legend: { orientation: "h", tracegroupgap: 0, yref: "container", y: 0, yanchor: "bottom", x: 0, xanchor: "left" },
    annotations: [], shapes: [],
  };
  const traces = [], gapX = columns > 1 ? 0.07 : 0, gapY = rows > 1 ? gap / inner : 0;
  panels.forEach((panel, place) => {
    const n = place ? String(place + 1) : "", row = Math.floor(place / columns), column = place % columns;
    const wide = (1 - gapX * (columns - 1)) / columns, tall = (1 - gapY * (rows - 1)) / rows;
    const left = column * (wide + gapX), top = 1 - row * (tall + gapY);
    const axis = { gridcolor: line, linecolor: line, zerolinecolor: line, fixedrange: true };
    const title = (text) => ({ text, standoff: 6 });
    layout["xaxis" + n] = { ...axis, domain: [left, left + wide], anchor: "y" + n, title: title(panel.x), ...panel.xaxis };
    layout["yaxis" + n] = { ...axis, domain: [Math.max(0, top - tall), top], anchor: "x" + n, ...panel.yaxis };
    if (panel.y && column === 0) layout["yaxis" + n].title = title(panel.y);
    if (panel.title) layout.annotations.push({
      text: plain(panel.title) + (panel.below ? "<br>" + panel.below : ""), xref: "paper", yref: "paper", x: left + wide / 2, y: top, yshift: 6, xanchor: "center",
      yanchor: "bottom", showarrow: false, font: { size: 13 },
    });
    for (const note of panel.annotations ?? []) layout.annotations.push({ ...note, xref: "x" + n, yref: "y" + n });
    for (const shape of panel.shapes ?? []) layout.shapes.push({ ...shape, xref: "x" + n, yref: "y" + n });
    for (const trace of panel.traces) traces.push({ ...trace, xaxis: "x" + n, yaxis: "y" + n });
  });
  const seen = new Set();  // a legend names each method once
  for (const trace of traces) {
    if (trace.showlegend === false || !trace.legendgroup) continue;
    trace.showlegend = !seen.has(trace.legendgroup);
    seen.add(trace.legendgroup);
  }
  const fresh = !plot.data;
  Plotly.react(plot, traces, layout, { displayModeBar: false });
  if (fresh) plot.on("plotly_legendclick", toggle);
}

// The scale of colours is the same in all panels of a figure: the first one shows it.
const colourbar = (place, title) => ({ showscale: place === 0, colorbar: { title, thickness: 12, x: 1.01, len: 0.9 } });

const hidden = {};  // methods whose lines the reader has hidden or shown, by name
function toggle(event) {
  const trace = event.data[event.curveNumber];
  hidden[trace.meta] = trace.visible !== "legendonly";
  setTimeout(drawAll);
  return false;
}
const visible = (cell) => (hidden[cell.name] ?? !cell.shown) ? "legendonly" : true;

function band(cell, x, mean, std, markers) {
  const shared = { x, legendgroup: plain(cell.name), visible: visible(cell), meta: cell.name };
  const edge = { ...shared, mode: "lines", line: { width: 0 }, hoverinfo: "skip", showlegend: false };
  return [
    { ...edge, y: mean.map((value, i) => value - std[i]) },
    { ...edge, y: mean.map((value, i) => value + std[i]), fill: "tonexty", fillcolor: cell.colour + "2e" },
    {
      ...shared, y: mean, name: plain(cell.name), mode: markers ? "lines+markers" : "lines",
      line: { color: cell.colour, dash: cell.dash, width: 2 }, marker: { symbol: cell.symbol, size: 6 },
      customdata: std, hovertemplate: "%{x}: %{y:.4f} ± %{customdata:.4f}<extra>" + plain(cell.name) + "</extra>",
    },
  ];
}

function drawAccuracy() {
  const shown = cells().filter((cell) => cell.accuracy);
  const chosen = [...new Set(["first", "second"].map((id) => element(id).selectedIndex))].filter((task) => task >= 0);
  const last = Math.max(1, ...shown.map((cell) => cell.accuracy.mean.length));
  draw("accuracy", !shown.length ? [] : chosen.map((task, place) => ({
    title: "task " + (task + 1), x: "tasks learned", y: "test accuracy", xaxis: { range: [0.5, last + 0.5] },
    yaxis: place ? { matches: "y" } : {},
    traces: shown.filter((cell) => cell.accuracy.mean.length > task).flatMap((cell) => {
      const mean = cell.accuracy.mean[task];
      return band(cell, range(task + 1, task + 1 + mean.length), mean, cell.accuracy.std[task]);
    }),
  })));
}

function drawDrop() {
  const shown = cells().filter((cell) => cell.drop), last = Math.max(1, ...shown.map((cell) => cell.drop.mean.length));
  draw("drop", !shown.length ? [] : [{
    title: benchmark().name, x: "task", y: "drop in accuracy", xaxis: { range: [0.5, last + 0.5] },
    traces: shown.flatMap((cell) => band(cell, range(1, cell.drop.mean.length + 1), cell.drop.mean, cell.drop.std, true)),
  }], { height: 290 });
}

function drawUsed() {
  const shown = cells().filter((cell) => cell.used), layers = Math.max(0, ...shown.map((cell) => cell.used.length));
  draw("used", range(0, layers).map((layer) => {
    const here = shown.filter((cell) => cell.used.length > layer), all = Math.max(...here.map((cell) => cell.used[layer].experts));
    const last = Math.max(...here.map((cell) => cell.used[layer].mean.length));
    const top = { type: "line", x0: 1, x1: last, y0: all, y1: all, line: { dash: "dash", width: 1, color: colour("--soft") } };
    return {
      title: "layer " + (layer + 1), x: "tasks learned", y: "experts in use", yaxis: { range: [0, all * 1.05] }, shapes: [top],
      traces: here.flatMap((cell) => {
        const { mean, std } = cell.used[layer];
        return band({ ...cell, shown: true }, range(1, mean.length + 1), mean, std);
      }),
    };
  }));
}

function drawSharing() {
  const shown = cells().filter((cell) => cell.sharing && cell.sharing.x.length);
  const last = Math.max(1, ...shown.flatMap((cell) => cell.sharing.task));
  const two = (value) => (value === null ? "–" : (value < 0 ? "−" : "+") + Math.abs(value).toFixed(2));
  draw("sharing", shown.map((cell, place) => ({
    title: cell.name, x: "share of its experts<br>that a later task uses too", y: "drop in accuracy",
    xaxis: { range: [-0.03, 1.03], zeroline: false },
    below: `ρ ${two(cell.sharing.rho)}, given place ${two(cell.sharing.given)}`,
    traces: [{
      x: cell.sharing.x, y: cell.sharing.y, mode: "markers", showlegend: false,
      customdata: cell.sharing.task.map((task, i) => [task, cell.sharing.seed[i]]),
      hovertemplate: "task %{customdata[0]}, seed %{customdata[1]}<br>share %{x:.2f}, drop %{y:.3f}<extra></extra>",
      marker: {
        color: cell.sharing.task, cmin: 1, cmax: last, colorscale: [[0, colour("--early")], [1, colour("--late")]], size: 5, opacity: 0.85,
        ...colourbar(place, { text: "task" }),
      },
    }],
  })), { legend: false, bar: true, top: 50, bottom: 70 });
}

function drawFigures() {
  drawAccuracy();
  drawDrop();
  drawUsed();
  drawSharing();
}
