// The charts of the last ten minutes, drawn by uPlot.

import { compact, figure, moment, NONE, rate, span } from "./format.js";
import { h, setText } from "./dom.js";

export const WINDOW_S = 600;
const HEIGHT = 132;
const COLOURS = ["--series-1", "--series-2", "--series-3", "--series-4"];

const seconds = (ms) => (ms == null ? NONE : span(ms / 1000));
const CHARTS = [
  { name: "auc", title: "AUC", format: figure, tick: (v) => v.toFixed(3), by: "auc", least: 0.01 },
  { name: "log_loss", title: "Log loss", format: figure, tick: (v) => v.toFixed(3), by: "log_loss", least: 0.01 },
  { name: "samples_per_s", title: "Throughput", format: (v) => (v == null ? NONE : `${rate(v)} samples/s`), tick: compact },
  { name: "lag", title: "Lag", format: (v) => (v == null ? NONE : `${rate(v)} samples`), tick: compact, why: "known with a coordinator" },
  { name: "freshness_ms", title: "Freshness", format: seconds, tick: (ms) => (ms ? seconds(ms) : "0"), why: "nothing is served yet" },
];

/** The lines of a chart, by label or just one, from points as the status has them. */
function linesOf(chart, points) {
  if (!chart.by) return [["", points.map((one) => one[chart.name] ?? null)]];
  const labels = [...new Set(points.flatMap((one) => Object.keys(one[chart.by] ?? {})))];
  return labels.map((label) => [label, points.map((one) => one[chart.by]?.[label] ?? null)]);
}

/** Figures from 0; others close around what they are, but never so close that noise looks like news. */
function rangeOf(chart, low, high) {
  if (low == null) return [0, 1];
  if (!chart.by) return [0, high > 0 ? high * 1.15 : 1];
  const room = Math.max(chart.least - (high - low), (high - low) * 0.2) / 2;
  return [Math.max(0, low - room), high + room];
}

/** As wide as the longest label of an axis, so that none is cut off. */
export function widest(plot, labels, axis) {
  plot.ctx.font = plot.axes[axis].font[0];
  const width = Math.max(0, ...(labels ?? []).map((one) => plot.ctx.measureText(one).width));
  return Math.max(40, Math.ceil(width / devicePixelRatio) + 12);
}

class Chart {
  constructor(about, charts) {
    this.about = about;
    this.charts = charts;
    this.readout = h("div", { class: "readout" });
    this.plot = h("div", { class: "plot", role: "img" });
    this.none = h("p", { class: "hint none" });
    this.element = h("figure", { class: "panel chart", id: `chart-${about.name}` },
      h("figcaption", {}, h("h3", {}, about.title), this.readout), this.plot, this.none);
    this.labels = null;
    new ResizeObserver(() => this.uplot?.setSize({ width: this.plot.clientWidth, height: HEIGHT })).observe(this.plot);
  }

  show(times, points) {
    this.times = times;
    this.lines = linesOf(this.about, points);
    const known = this.lines.map(([, values]) => values.filter((one) => one != null).length);
    this.element.dataset.points = Math.max(0, ...known);
    const empty = !known.some(Boolean);
    setText(this.none, empty ? (this.about.why ?? "no figures yet") : "");
    const labels = this.lines.map(([label]) => label).join("\n");
    if (this.labels !== labels) this.#build(labels);
    this.uplot.setData([times, ...this.lines.map(([, values]) => values)]);
    this.read(this.charts.at);
  }

  /** Writes the values at a position, or the latest ones, next to the title. */
  read(at) {
    const texts = this.lines.map(([label, values]) => {
      const value = at == null ? values.findLast((one) => one != null) : values[at];
      return [label, this.about.format(value ?? null)];
    });
    const when = at == null ? "" : moment(this.times[at]);
    const wanted = texts.length + (when ? 1 : 0);
    while (this.readout.children.length > wanted) this.readout.lastChild.remove();
    while (this.readout.children.length < wanted) this.readout.append(h("span", {}, h("i"), h("b"), " ", h("em")));
    texts.forEach(([label, text], i) => this.#write(this.readout.children[i], label, text, label ? i : -1));
    if (when) this.#write(this.readout.lastChild, `at ${when}`, "", -1);
    const said = texts.map(([label, text]) => `${label} ${text}`.trim()).join(", ");
    const name = `${this.about.title} over the last ten minutes; latest: ${said || NONE}`;
    if (at == null && this.plot.getAttribute("aria-label") !== name) this.plot.setAttribute("aria-label", name);
  }

  #write(element, label, text, colour) {
    element.children[0].className = colour < 0 ? "" : `swatch series-${(colour % COLOURS.length) + 1}`;
    setText(element.children[1], text);
    setText(element.children[2], label);
  }

  rebuild() {
    if (this.labels !== null) this.#build(this.labels);
  }

  #build(labels) {
    this.labels = labels;
    this.uplot?.destroy();
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).trim();
    const axis = {
      stroke: colour("--muted"), font: `11px ${colour("--font")}`, ticks: { show: false },
      grid: { stroke: colour("--line"), width: 1 },
    };
    const clock = (_, splits) => splits.map((one) => moment(one).slice(0, 5));
    this.uplot = new uPlot({
      width: this.plot.clientWidth || 320,
      height: HEIGHT,
      padding: [6, 20, 0, 0], // room for half of the last time
      legend: { show: false },
      cursor: { y: false, drag: { x: false, y: false }, sync: { key: "live" }, points: { size: 6 } },
      scales: {
        x: { time: true, range: () => [this.charts.now - WINDOW_S, this.charts.now] },
        y: { range: (_, low, high) => rangeOf(this.about, low, high) },
      },
      axes: [
        { ...axis, grid: { show: false }, size: 22, gap: 4, space: 70, values: clock },
        { ...axis, size: widest, gap: 6, space: 34, values: (_, splits) => splits.map(this.about.tick) },
      ],
      series: [{}, ...this.lines.map((_, i) => ({
        stroke: colour(COLOURS[i % COLOURS.length]), width: 1.5, points: { show: false },
      }))],
      hooks: { setCursor: [(u) => this.charts.point(u.cursor.idx)] },
    }, [this.times, ...this.lines.map(([, values]) => values)], this.plot);
  }
}

/** All charts; they share their times and where the pointer is. */
export class Charts {
  constructor(container) {
    this.now = Date.now() / 1000;
    this.at = null;
    this.all = CHARTS.map((about) => new Chart(about, this));
    container.prepend(...this.all.map((one) => one.element));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.all.forEach((one) => one.rebuild()));
  }

  /** Shows points `{ time, samples_per_s, lag, freshness_ms, auc, log_loss }`, ascending. */
  show(points, now) {
    this.now = now;
    const shown = points.filter((one) => one.time > now - WINDOW_S);
    if (this.at != null && this.at >= shown.length) this.at = null;
    this.all.forEach((one) => one.show(shown.map((point) => point.time), shown));
  }

  point(at) {
    if (at === this.at) return;
    this.at = at ?? null;
    this.all.forEach((one) => one.lines && one.read(this.at));
  }
}
