"use strict";
// Draws the page's figures from the numbers in #data. Text from the data goes in as text: textContent, or `plain` for plotly.

const data = JSON.parse(document.getElementById("data").textContent);
const element = (id) => document.getElementById(id);
const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
const range = (start, end) => Array.from({ length: Math.max(0, end - start) }, (_, i) => start + i);
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// What is chosen.

const table = () => data.tables[element("table").selectedIndex];
const benchmark = () => table().benchmarks[element("benchmark").selectedIndex];
const cells = () => benchmark().cells;
const routed = () => cells().filter((cell) => cell.routes.length);
const method = () => routed()[element("method").selectedIndex];
const run = () => method() && method().routes[element("seed").selectedIndex];
const phase = () => Number(element("phase").value) - 1;

function fill(id, names, wanted) {
  const select = element(id), before = wanted ?? select.value;
  select.replaceChildren(...names.map((name) => new Option(name, name)));
  if (names.includes(before)) select.value = before;
}

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
        showscale: place === 0, colorbar: { title: { text: "task" }, thickness: 12, x: 1.01, len: 0.9 },
      },
    }],
  })), { legend: false, bar: true, top: 50, bottom: 70 });
}

// Routes.

const matrix = (layer, at) => layer.phases[at].map((row) => {
  const gates = new Array(layer.experts).fill(0);
  for (let i = 0; i < row.length; i += 2) gates[row[i]] = row[i + 1] / 1000;
  return gates;
});
const product = (one, other) => one.reduce((sum, gate, i) => sum + gate * other[i], 0);
const claimed = (layer, at) => new Set(at < 0 ? [] : layer.phases[at].flatMap((row) => row.filter((_, i) => i % 2 === 0)));

function heat(title, label, z, size, tasks, top, template, frame) {
  const scale = [[0, colour("--zero")], [1, colour("--full")]];
  return {
    title, x: label, y: "task", shapes: frame,
    xaxis: { range: [0.5, size + 0.5], showgrid: false, zeroline: false },
    yaxis: { range: [tasks + 0.5, 0.5], showgrid: false, zeroline: false },
    traces: [{
      type: "heatmap", x: range(1, size + 1), y: range(1, tasks + 1), z, zmin: 0, zmax: top, colorscale: scale, xgap: 1, ygap: 1,
      hovertemplate: template, hoverongaps: false, showlegend: false, colorbar: { thickness: 12, x: 1.01, len: 0.9 },
    }],
  };
}

function drawRoutes() {
  const shown = run();
  if (!shown) {
    ["routing", "similarity", "router"].forEach((id) => draw(id, []));
    element("claims").textContent = "No routes are recorded for this choice.";
    element("learned").textContent = "–";
    return;
  }
  const at = phase(), tasks = shown.tasks, learned = shown.layers[0].phases[at].length;
  const one = shown.layers[0].phases.length === 1, task = learned - 1;
  element("learned").textContent = `${learned} of ${tasks}`;
  element("phase").setAttribute("aria-valuetext", `${learned} of ${tasks} tasks learned`);
  element("claims").textContent = shown.layers.map((layer, place) => {
    const now = claimed(layer, at), before = claimed(layer, at - 1), fresh = [...now].filter((expert) => !before.has(expert));
    return `Layer ${place + 1}: ${now.size} of ${layer.experts} experts in use` + (one ? "" : `, ${fresh.length} of them new`);
  }).join(". ") + ".";
  const blank = range(learned, tasks);
  const frame = (size) => one ? [] : [{
    type: "rect", x0: 0.5, x1: size + 0.5, y0: task + 0.5, y1: task + 1.5, line: { color: colour("--accent"), width: 2 },
  }];
  const gates = shown.layers.map((layer) => matrix(layer, at));
  const last = shown.layers.map((layer) => matrix(layer, layer.phases.length - 1));
  const top = Math.max(...last.flat(2)), alike = Math.max(...last.flat().map((row) => product(row, row)));
  const colourbar = (panels) => panels.map((panel, place) => {
    panel.traces[0].showscale = place === 0;
    return panel;
  });
  draw("routing", colourbar(shown.layers.map((layer, place) => heat(
    "layer " + (place + 1), "expert, in the order of claims",
    [...gates[place], ...blank.map(() => new Array(layer.experts).fill(null))], layer.experts, tasks, top,
    "task %{y}, expert %{x}: gate %{z:.2f}<extra></extra>", frame(layer.experts),
  ))), { legend: false, bar: true, blank: true, height: 320 });
  draw("similarity", colourbar(shown.layers.map((layer, place) => heat(
    "layer " + (place + 1), "task",
    range(0, tasks).map((i) => range(0, tasks).map((j) => (
      i < learned && j < learned ? product(gates[place][i], gates[place][j]) : null))),
    tasks, tasks, alike, "tasks %{y} and %{x}: %{z:.2f}<extra></extra>", frame(learned),
  ))), { legend: false, bar: true, blank: true, height: 360 });
  drawRouter(shown, gates, task);
}

function drawRouter(shown, gates, task) {
  const traces = [], annotations = [], ink = colour("--ink"), green = method().colour;
  const label = (x, y, text) => annotations.push({ x, y, text, showarrow: false, font: { size: 12 } });
  label(0, -0.65, "input");
  shown.layers.forEach((layer, place) => {
    const height = 2 * place, at = (expert) => (layer.experts > 1 ? -1 + (2 * expert) / (layer.experts - 1) : 0);
    gates[place][task].forEach((gate, expert) => {
      if (gate > 0) traces.push({
        x: [0, at(expert), 0], y: [height - 0.45, height + 0.3, height + 1.05], mode: "lines", hoverinfo: "skip",
        showlegend: false, line: { color: green, width: 0.8 + 9 * gate },
      });
    });
    traces.push({
      x: range(0, layer.experts).map(at), y: new Array(layer.experts).fill(height + 0.3), mode: "markers", showlegend: false,
      customdata: gates[place][task].map((gate, expert) => [expert + 1, gate]),
      hovertemplate: "expert %{customdata[0]}: gate %{customdata[1]:.2f}<extra></extra>",
      marker: {
        size: Math.max(3, Math.min(14, 240 / layer.experts)), line: { color: ink, width: 1 },
        color: gates[place][task].map((gate) => (gate > 0 ? green : colour("--paper"))),
      },
    });
    label(0, height + 1.3, "Σ");
    label(-0.9, height + 0.75, "layer " + (place + 1));
  });
  const layers = shown.layers.length;
  label(0, 2 * layers - 0.3, "head of task " + (task + 1));
  const bare = { showgrid: false, zeroline: false, showticklabels: false, showline: false };
  draw("router", [{
    x: "", traces, annotations,
    xaxis: { ...bare, range: [-1.1, 1.1] }, yaxis: { ...bare, range: [-0.9, 2 * layers] },
  }], { legend: false, bottom: 8, top: 8, height: 40 + 120 * layers });
}

// Choices.

function chooseTable() {
  fill("benchmark", table().benchmarks.map((one) => one.name), undefined);
  chooseBenchmark();
}

function chooseBenchmark() {
  const tasks = Math.max(0, ...cells().map((cell) => (cell.accuracy ? cell.accuracy.mean.length : 0)));
  const names = range(1, tasks + 1).map(String), kept = ["first", "second"].map((id) => element(id).value);
  fill("first", names, kept[0] || "1");
  fill("second", names, kept[1] || String(tasks > 10 ? 10 : Math.floor(tasks / 2) + 1));
  fill("method", routed().map((cell) => cell.name), element("method").value || table().usual);
  drawAccuracy();
  drawDrop();
  drawUsed();
  drawSharing();
  chooseMethod();
}

function chooseMethod() {
  fill("seed", method() ? method().routes.map((one) => String(one.seed)) : [], undefined);
  chooseSeed();
}

function chooseSeed() {
  const slider = element("phase"), phases = run() ? run().layers[0].phases.length : 1, atEnd = slider.value === slider.max;
  slider.max = phases;
  if (atEnd) slider.value = phases;
  slider.disabled = element("play").disabled = phases < 2;
  drawRoutes();
}

function drawAll() {
  drawAccuracy();
  drawDrop();
  drawUsed();
  drawSharing();
  drawRoutes();
}

// Light and dark.

const prefersDark = matchMedia("(prefers-color-scheme: dark)");
let wanted = null;
try { wanted = localStorage.getItem("cotrain-theme"); } catch { /* a page from a file may have no storage */ }

function applyTheme() {
  const dark = wanted === null ? prefersDark.matches : wanted === "dark";
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  element("theme").setAttribute("aria-pressed", String(dark));
}

element("theme").addEventListener("click", () => {
  wanted = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  try { localStorage.setItem("cotrain-theme", wanted); } catch { /* as above */ }
  applyTheme();
  drawAll();
});
prefersDark.addEventListener("change", () => { applyTheme(); drawAll(); });

// Play, downloads, widths.

let playing = null;
function stop() {
  clearInterval(playing);
  playing = null;
  element("play").textContent = "▶";
  element("play").setAttribute("aria-label", "Play");
}
element("play").addEventListener("click", () => {
  if (playing !== null) return stop();
  const slider = element("phase");
  if (slider.value === slider.max) slider.value = 1;
  element("play").textContent = "❚❚";
  element("play").setAttribute("aria-label", "Pause");
  drawRoutes();
  playing = setInterval(() => {
    slider.value = Number(slider.value) + 1;
    drawRoutes();
    if (slider.value === slider.max) stop();
  }, 700);
});

document.querySelectorAll("figure button[data-format]").forEach((button) => button.addEventListener("click", () => {
  const figure = button.closest("figure"), plot = figure.querySelector(".plot");
  const { width, height } = plot.layout;
  const filename = [table().name, benchmark().name, figure.id].join("-").replace(/[^a-z0-9]+/gi, "-");
  Plotly.downloadImage(plot, { format: button.dataset.format, filename, width, height, scale: 2 });
}));

document.querySelectorAll("form").forEach((form) => form.addEventListener("submit", (event) => event.preventDefault()));
element("table").addEventListener("change", chooseTable);
element("benchmark").addEventListener("change", chooseBenchmark);
element("first").addEventListener("change", drawAccuracy);
element("second").addEventListener("change", drawAccuracy);
element("method").addEventListener("change", chooseMethod);
element("seed").addEventListener("change", chooseSeed);
element("phase").addEventListener("input", () => { if (playing !== null) stop(); drawRoutes(); });

let width = innerWidth, waiting = null;
addEventListener("resize", () => {
  if (innerWidth === width) return;  // a phone's address bar changes the height alone
  width = innerWidth;
  clearTimeout(waiting);
  waiting = setTimeout(drawAll, 100);
});

applyTheme();
fill("table", data.tables.map((one) => one.name), data.tables.some((one) => one.name === "tuned") ? "tuned" : undefined);
if (!data.tables.some((one) => one.benchmarks.some((two) => two.cells.some((cell) => cell.routes.length)))) {
  element("routes").hidden = true;
  document.querySelector('nav a[href="#routes"]').parentElement.hidden = true;
}
fill("benchmark", table().benchmarks.map((one) => one.name), "rotated-mnist");
chooseBenchmark();
