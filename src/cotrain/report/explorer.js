// Routes, task by task: what one run's router chose after as many tasks as the slider says.

const routed = () => cells().filter((cell) => cell.routes.length);
const method = () => routed()[element("method").selectedIndex];
const run = () => method() && method().routes[element("seed").selectedIndex];
const phase = () => Number(element("phase").value) - 1;

const matrix = (layer, at) => layer.phases[at].map((row) => {
  const gates = new Array(layer.experts).fill(0);
  for (let i = 0; i < row.length; i += 2) gates[row[i]] = row[i + 1] / 1000;
  return gates;
});
const product = (one, other) => one.reduce((sum, gate, i) => sum + gate * other[i], 0);
const claimed = (layer, at) => new Set(at < 0 ? [] : layer.phases[at].flatMap((row) => row.filter((_, i) => i % 2 === 0)));

function heat(place, label, z, size, tasks, top, template, frame) {
  const scale = [[0, colour("--zero")], [1, colour("--full")]];
  return {
    title: "layer " + (place + 1), x: label, y: "task", shapes: frame,
    xaxis: { range: [0.5, size + 0.5], showgrid: false, zeroline: false },
    yaxis: { range: [tasks + 0.5, 0.5], showgrid: false, zeroline: false },
    traces: [{
      type: "heatmap", x: range(1, size + 1), y: range(1, tasks + 1), z, zmin: 0, zmax: top, colorscale: scale, xgap: 1, ygap: 1,
      hovertemplate: template, hoverongaps: false, showlegend: false, ...colourbar(place),
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
  draw("routing", shown.layers.map((layer, place) => heat(
    place, "expert, in the order of claims",
    [...gates[place], ...blank.map(() => new Array(layer.experts).fill(null))], layer.experts, tasks, top,
    "task %{y}, expert %{x}: gate %{z:.2f}<extra></extra>", frame(layer.experts),
  )), { legend: false, bar: true, blank: true, height: 320 });
  draw("similarity", shown.layers.map((layer, place) => heat(
    place, "task",
    range(0, tasks).map((i) => range(0, tasks).map((j) => (
      i < learned && j < learned ? product(gates[place][i], gates[place][j]) : null))),
    tasks, tasks, alike, "tasks %{y} and %{x}: %{z:.2f}<extra></extra>", frame(learned),
  )), { legend: false, bar: true, blank: true, height: 360 });
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

function chooseRoutes() {
  fill("method", routed().map((cell) => cell.name), element("method").value || table().usual);
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

// Play.

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

element("method").addEventListener("change", chooseMethod);
element("seed").addEventListener("change", chooseSeed);
element("phase").addEventListener("input", () => { if (playing !== null) stop(); drawRoutes(); });
