// What the reader chooses: table and benchmark, light or dark, downloads; then the page's first drawing.

const table = () => data.tables[element("table").selectedIndex];
const benchmark = () => table().benchmarks[element("benchmark").selectedIndex];
const cells = () => benchmark().cells;

function fill(id, names, wanted) {
  const select = element(id), before = wanted ?? select.value;
  select.replaceChildren(...names.map((name) => new Option(name, name)));
  if (names.includes(before)) select.value = before;
}

function chooseTable(wanted) {
  fill("benchmark", table().benchmarks.map((one) => one.name), wanted);
  chooseBenchmark();
}

function chooseBenchmark() {
  const tasks = Math.max(0, ...cells().map((cell) => (cell.accuracy ? cell.accuracy.mean.length : 0)));
  const names = range(1, tasks + 1).map(String), kept = ["first", "second"].map((id) => element(id).value);
  fill("first", names, kept[0] || "1");
  fill("second", names, kept[1] || String(tasks > 10 ? 10 : Math.floor(tasks / 2) + 1));
  drawFigures();
  chooseRoutes();
}

function drawAll() {
  drawFigures();
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

// Downloads, widths.

document.querySelectorAll("figure button[data-format]").forEach((button) => button.addEventListener("click", () => {
  const figure = button.closest("figure"), plot = figure.querySelector(".plot");
  const { width, height } = plot.layout;
  const filename = [table().name, benchmark().name, figure.id].join("-").replace(/[^a-z0-9]+/gi, "-");
  Plotly.downloadImage(plot, { format: button.dataset.format, filename, width, height, scale: 2 });
}));

document.querySelectorAll("form").forEach((form) => form.addEventListener("submit", (event) => event.preventDefault()));
element("table").addEventListener("change", () => chooseTable());
element("benchmark").addEventListener("change", chooseBenchmark);
element("first").addEventListener("change", drawAccuracy);
element("second").addEventListener("change", drawAccuracy);

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
chooseTable("rotated-mnist");
