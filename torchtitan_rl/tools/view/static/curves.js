// Draws curves with uPlot, several runs over each other, and looks for new points.
const EVERY_MS = 1500, MAX_CURVES = 64, DASHES = [[], [6, 4], [2, 3], [10, 3, 2, 3]];
const charts = document.getElementById("charts"), said = document.getElementById("live");
const SVG = "http://www.w3.org/2000/svg", log = charts.dataset.scale === "log";
const dark = matchMedia("(prefers-color-scheme: dark)");
const plots = new Map();
const inSight = new Set(); // figures: only their curves are asked for and drawn
let state = "", newest = [];

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

async function look() {
  if (document.hidden && state) return;
  const figures = [...inSight].slice(0, MAX_CURVES);
  const asked = figures.map((figure) => `&metric=${encodeURIComponent(figure.dataset.metric)}`).join("");
  const have = figures.every((figure) => figure.dataset.state === state) ? state : "";
  try {
    const answer = await fetch(`/api/curves${charts.dataset.query}${asked}&have=${have}`);
    if (!answer.ok) throw new Error(answer.status);
    const now = await answer.json();
    if (now.charts) {
      newest = now.charts;
      draw();
      for (const figure of figures) figure.dataset.state = now.state;
    }
    state = now.state;
    tell("live", false);
  } catch {
    tell("the viewer does not answer", true);
  }
}

function tell(text, off) {
  if (said && said.textContent !== text) said.textContent = text;
  said?.classList.toggle("off", off);
}

function draw() {
  for (const chart of newest) {
    const figure = [...charts.children].find((f) => f.dataset.metric === chart.metric);
    if (!figure) continue;
    const lines = chart.lines.filter((line) => line.steps.length);
    legend(figure, lines, dashes(lines));
    const place = figure.querySelector(".plot");
    const data = lines.length ? uPlot.join(lines.map((line) => [line.steps, onScale(line.values)])) : [[], []];
    const key = lines.map((line) => line.name).join("\n") + dark.matches;
    const plot = plots.get(figure);
    if (plot && plot.key === key) plot.plot.setData(data);
    else {
      plot?.plot.destroy();
      plots.set(figure, { key, plot: new uPlot(options(figure, place, lines), data, place) });
    }
    figure.dataset.points = lines.reduce((sum, line) => sum + line.steps.length, 0);
  }
}

// A logarithmic scale has no place for values that are not above 0.
function onScale(values) {
  return log ? values.map((value) => (value > 0 ? value : null)) : values;
}

// The dashes of every line: those of one run, such as its sets of tasks, differ.
function dashes(lines) {
  const seen = new Map();
  return lines.map((line) => {
    const nth = seen.get(line.run) ?? 0;
    seen.set(line.run, nth + 1);
    return DASHES[nth % DASHES.length];
  });
}

function sample(dash) {
  const svg = document.createElementNS(SVG, "svg"), line = document.createElementNS(SVG, "line");
  for (const [name, value] of Object.entries({ class: "sample", width: 30, height: 8, "aria-hidden": "true" })) svg.setAttribute(name, value);
  for (const [name, value] of Object.entries({ x1: 0, x2: 30, y1: 4, y2: 4, "stroke-dasharray": dash.join(" ") })) line.setAttribute(name, value);
  svg.append(line);
  return svg;
}

function legend(figure, lines, drawn) {
  figure.querySelector(".legend").replaceChildren(...lines.map((line, i) => {
    const key = document.createElement("span"), value = document.createElement("b");
    key.className = `key c${line.run % 8}`;
    const last = line.values.findLast((v) => v !== null);
    value.textContent = last === undefined ? "–" : short(last);
    key.append(sample(drawn[i]), `${line.name} `, value);
    return key;
  }));
  const below = log ? lines.reduce((sum, line) => sum + line.values.filter((value) => value !== null && value <= 0).length, 0) : 0;
  if (below) figure.querySelector(".legend").append(`${below} values are not above 0: not on this scale`);
  const told = lines.map((line) => `${line.name}: ${line.steps.length} points`).join(", ");
  figure.querySelector(".plot").setAttribute("aria-label", `${figure.dataset.metric} over steps; ${told || "no points"}`);
}

function options(figure, place, lines) {
  const ink = css("--muted"), grid = css("--line"), drawn = dashes(lines);
  const label = { labelFont: "12px system-ui", labelSize: 18, labelGap: 0 };
  const axis = { ...label, stroke: ink, grid: { stroke: grid, width: 1 }, ticks: { stroke: grid, width: 1 }, font: "12px system-ui" };
  return {
    width: place.clientWidth, height: place.clientHeight, legend: { show: false }, cursor: { y: false },
    scales: { x: { time: false }, y: log ? { distr: 3 } : { range: (_, low, high) => apart(low, high) } },
    axes: [{ ...axis, size: 30, label: figure.dataset.steps }, { ...axis, size: 76, label: figure.dataset.unit, values: (_, ticks) => ticks.map(short) }],
    series: [{}, ...lines.map((line, i) => ({
      label: line.name, stroke: css(`--c${line.run % 8}`), width: 1.8, dash: drawn[i],
      spanGaps: true, points: { show: line.steps.length < 40, size: 5 },
    })), ...(lines.length ? [] : [{}])],
  };
}

function apart(low, high) {
  if (low === null) return [0, 1];
  if (low === high) return low === 0 ? [0, 1] : [low - Math.abs(low) / 10, high + Math.abs(high) / 10];
  return [low - (high - low) / 20, high + (high - low) / 20];
}

function short(value) {
  if (value === null) return "";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e5)) return value.toExponential(1).replace("-", "−");
  return String(+value.toPrecision(3)).replace("-", "−");
}

dark.addEventListener("change", () => {
  for (const figure of charts.children) figure.dataset.state = "";
  look();
});
addEventListener("resize", () => {
  for (const [figure, { plot }] of plots) {
    const place = figure.querySelector(".plot");
    plot.setSize({ width: place.clientWidth, height: place.clientHeight });
  }
});
if (charts.children.length) {
  const sight = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) isIntersecting ? inSight.add(target) : inSight.delete(target);
    look();
  }, { rootMargin: "100%" });
  for (const figure of charts.children) sight.observe(figure);
  setInterval(look, EVERY_MS);
} else setTimeout(() => location.reload(), 2 * EVERY_MS); // there are no metrics yet
