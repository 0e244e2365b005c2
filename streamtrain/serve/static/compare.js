// Comparison with another model that learns from the same topic: the difference of their losses, and their figures.

import { ask } from "./api.js";
import { widest } from "./charts.js";
import { byId, fill, h, setText, Table } from "./dom.js";
import { compact, count, figure, moment, NONE } from "./format.js";

const LIST_EVERY_MS = 10_000;
const EVERY_MS = 3_000;
const HEIGHT = 180;
const EARLY = 4; // the first quarter of a course, whose interval is wide, does not decide the scale

let others = [];
let chosen = "";
let found = null; // what the server said last; null: nothing yet
let trouble = "";
let listedAt = 0, askedAt = 0;
let busy = false;
const charts = new Map(); // by label

const signed = (x) => (x == null ? NONE : `${x < 0 ? "\u2212" : "+"}${Math.abs(x).toFixed(4)}`);
const lossOf = (one) => figure(one.log_loss ?? one.mean_squared_error);

const figures = new Table("Figures over the same blocks", [
  { head: "Model", cell: (row) => row.name },
  { head: "Label", cell: (row) => row.label },
  { head: "Samples", num: true, cell: (row) => count(row.samples) },
  { head: "Loss", num: true, cell: lossOf },
  { head: "AUC", num: true, cell: (row) => figure(row.auc) },
  { head: "Calibration", num: true, cell: (row) => figure(row.calibration) },
  { head: "Not finite", num: true, cell: (row) => count(row.non_finite) },
]);

/** The difference after more and more blocks, with its interval and a line at 0. */
class Difference {
  constructor() {
    this.title = h("h3");
    this.readout = h("div", { class: "readout" }, h("b"));
    this.plot = h("div", { class: "plot difference", role: "img" });
    this.sentence = h("p", { class: "sentence" });
    this.element = h("figure", { class: "chart" },
      h("figcaption", {}, this.title, this.readout), this.sentence, this.plot);
    this.observer = new ResizeObserver(() => this.uplot?.setSize({ width: this.plot.clientWidth, height: HEIGHT }));
    this.observer.observe(this.plot);
  }

  show(a, b, result) {
    this.course = result.course;
    setText(this.title, `${result.label}: ${result.loss} of ${a} minus that of ${b}`);
    setText(this.sentence, `${result.sentence[0].toUpperCase()}${result.sentence.slice(1)}.`);
    this.plot.setAttribute("aria-label", `Difference by number of blocks, with its interval. ${this.sentence.textContent}`);
    this.plot.hidden = !this.course.length;
    this.element.dataset.points = this.course.length;
    if (this.course.length) {
      this.range = this.#range();
      if (!this.uplot || this.isPoint !== (this.course.length === 1)) this.#build();
      this.uplot.setData(this.#data());
    }
    this.#read(null);
  }

  close() {
    this.observer.disconnect();
    this.uplot?.destroy();
    this.uplot = null;
  }

  rebuild() {
    if (this.uplot) this.#build();
  }

  #data() {
    const column = (name) => this.course.map((one) => one[name]);
    return [column("blocks"), column("low"), column("high"), this.course.map(() => 0), column("difference")];
  }

  #range() {
    const late = this.course.slice(Math.floor(this.course.length / EARLY));
    const low = Math.min(0, ...late.map((one) => one.low)), high = Math.max(0, ...late.map((one) => one.high));
    const room = (high - low) * 0.1 || 1e-4;
    return [low - room, high + room];
  }

  #read(at) {
    const one = this.course[at ?? this.course.length - 1];
    const where = one && at != null ? ` after ${count(one.blocks)} blocks` : "";
    setText(this.readout.firstChild, one ? `${signed(one.difference)} (${signed(one.low)} to ${signed(one.high)})${where}` : "");
  }

  #build() {
    this.uplot?.destroy();
    this.isPoint = this.course.length === 1; // of which no line can be drawn
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).trim();
    const axis = { stroke: colour("--muted"), font: `11px ${colour("--font")}`, ticks: { show: false } };
    const grid = { stroke: colour("--line"), width: 1 };
    const edge = { stroke: `${colour("--series-1")}66`, width: 1, points: { show: false } };
    this.uplot = new uPlot({
      width: this.plot.clientWidth || 320,
      height: HEIGHT,
      padding: [8, 20, 0, 0],
      legend: { show: false },
      cursor: { y: false, drag: { x: false, y: false }, points: { show: false } },
      scales: {
        x: { time: false, range: (_, low, high) => [low, high > low ? high : low + 1] },
        y: { range: () => this.range },
      },
      axes: [
        { ...axis, grid: { show: false }, size: 22, gap: 4, space: 70, values: (_, splits) => splits.map((n) => (Number.isInteger(n) ? compact(n) : "")) },
        { ...axis, grid, size: widest, gap: 6, space: 34, values: (_, splits) => splits.map((x) => x.toPrecision(2) * 1) },
      ],
      series: [
        {}, edge, edge,
        { stroke: colour("--ink"), width: 1, dash: [4, 3], points: { show: false } },
        { stroke: colour("--series-1"), width: 2, points: { show: this.isPoint } },
      ],
      bands: [{ series: [2, 1], fill: `${colour("--series-1")}26` }],
      hooks: { setCursor: [(u) => this.#read(u.cursor.idx)] },
    }, this.#data(), this.plot);
  }
}

export function startCompare() {
  byId("compare-other").addEventListener("change", (event) => choose(event.target.value));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => charts.forEach((one) => one.rebuild()));
  byId("compare-figures").append(figures.element);
}

function choose(other) {
  chosen = other;
  found = null;
  trouble = "";
  askedAt = 0;
  draw();
  refresh();
}

/** Asks for the models that there are, and for the comparison with one of them, if it is time to. */
async function refresh() {
  if (busy) return;
  busy = true;
  try {
    if (Date.now() - listedAt > LIST_EVERY_MS) {
      listedAt = Date.now();
      others = (await ask("/compare")).json.others;
      if (!others.includes(chosen)) {
        chosen = others[0] ?? "";
        found = null;
        askedAt = 0;
      }
    }
    if (chosen && Date.now() - askedAt > EVERY_MS) {
      askedAt = Date.now();
      const other = chosen;
      const { json } = await ask(`/compare/${encodeURIComponent(other)}`);
      if (other === chosen) found = json;
    }
    trouble = "";
  } catch (error) {
    trouble = error.message;
    if (error.status === 404) { // a fork that is gone, or that has nothing in common yet
      found = null;
      listedAt = 0;
    }
  } finally {
    busy = false;
  }
  draw();
}

/** Called with every look at the process. */
export function showCompare({ process, away }) {
  if (process?.compare && !away) refresh();
}

function draw() {
  byId("compare").hidden = !others.length;
  byId("to-compare").hidden = !others.length;
  const select = byId("compare-other");
  fill(select, JSON.stringify(others), () => others.map((one) => h("option", { value: one }, one)));
  if (select.value !== chosen) select.value = chosen;
  setText(byId("compare-trouble"), trouble ? `${trouble[0].toUpperCase()}${trouble.slice(1)}.` : !found && chosen ? "Comparing." : "");
  const results = found?.results ?? [];
  const labels = new Set(results.map((one) => one.label));
  for (const [label, chart] of charts)
    if (!labels.has(label)) {
      chart.close();
      chart.element.remove();
      charts.delete(label);
    }
  for (const result of results) {
    if (!charts.has(result.label)) {
      charts.set(result.label, new Difference());
      byId("compare-charts").append(charts.get(result.label).element);
    }
    charts.get(result.label).show(found.a, found.b, result);
  }
  byId("compare-figures").hidden = !found;
  figures.update(results.flatMap((one) => [
    { name: found.a, label: one.label, ...one.figures_a }, { name: found.b, label: one.label, ...one.figures_b }]));
  setText(byId("compare-about"), found ? about(found) : "");
}

function about({ a, b, blocks, from, to, dropped }) {
  const span = from && to ? `, event time ${moment(from)} to ${moment(to)}` : "";
  const moving = dropped ? " Older blocks are gone (compare.keep), so the interval is that of a window that moves." : "";
  return `Over ${count(blocks)} blocks of offsets that both have${span}. Above 0, ${b} predicts better than ${a}; the probability that `
    + `the interval ever excludes the true difference is at most 5 %.${moving}`;
}
