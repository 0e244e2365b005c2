// What learns and serves the model, as the coordinator tells: shards, workers, servers and dead letters.

import { byId, fill, h, setText, Table } from "./dom.js";
import { bytes, count, moment, NONE, rate, span, sum } from "./format.js";

const MANY = matchMedia("(max-width: 800px)").matches ? 0 : 8; // rows beyond which a table of shards is closed at first
const STATES = { ready: "good", empty: "warn", away: "bad" };

const total = (values) => (values == null || !Object.keys(values).length ? null : sum(values));

const shards = new Table("Shards", [
  { head: "Shard", cell: (one) => `${one.index}` },
  { head: "Address", cell: (one) => one.address ?? NONE },
  { head: "State", cell: state, tone: (one) => (one.backup_in_step === false ? "warn" : STATES[one.state]) },
  { head: "Rows", num: true, cell: (one) => count(total(one.rows)) },
  { head: "Memory", num: true, cell: (one) => bytes(one.bytes) },
  { head: "Clock, total", num: true, cell: (one) => count(total(one.clock)) },
  { head: "Samples", num: true, cell: (one) => count(one.samples) },
  { head: "Checkpoint", num: true, cell: (one) => (one.epoch == null ? NONE : `epoch ${one.epoch}`) },
], "No shard is known.");

const workers = new Table("Workers", [
  { head: "Worker", cell: (one) => one.name },
  { head: "Partitions", cell: partitions, tone: (one) => (one.stalled?.length ? "bad" : "") },
  { head: "Lag", num: true, cell: (one) => count(one.lag) },
  { head: "Samples/s", num: true, cell: (one) => rate(one.samples_per_s) },
  { head: "Samples/batch", num: true, cell: (one) => rate(one.samples_per_batch) },
  { head: "Seen", num: true, cell: (one) => (one.seen == null ? NONE : `${span(one.seen)} ago`) },
], "No worker is known.");

const servers = new Table("Servers", [
  { head: "Server", cell: (one) => one.name },
  { head: "Address", cell: (one) => one.address ?? NONE },
  { head: "Version", cell: (one) => one.version ?? NONE },
  { head: "Publication", num: true, cell: (one) => count(one.publication) },
  { head: "Freshness", num: true, cell: (one) => span(one.fresh) },
], "No server is known.");

/** Those that a worker has, and those of them that stand still. */
function partitions(one) {
  const stalled = one.stalled?.length ? `; ${ranges(one.stalled)} stands still` : "";
  return `${ranges(one.partitions ?? [])}${stalled}`;
}

/** What a shard says of itself, and of its backup if it has one. */
function state(one) {
  const backup = { true: ", backup in step", false: ", no backup" }[one.backup_in_step] ?? "";
  return one.state == null ? NONE : `${one.state}${backup}`;
}

/** As everywhere: how long ago the latest event was that the served model has learned, in seconds. */
function freshnessOf(server, now) {
  if (server.watermark != null) return now - server.watermark;
  return server.freshness_ms == null ? null : server.freshness_ms / 1000;
}

/** Partitions 0, 1, 2, 5 as "0–2, 5". */
function ranges(numbers) {
  const parts = [];
  for (const one of [...numbers].sort((a, b) => a - b)) {
    const last = parts.at(-1);
    if (last && one === last[1] + 1) last[1] = one;
    else parts.push([one, one]);
  }
  return parts.map(([from, to]) => (from === to ? `${from}` : `${from}–${to}`)).join(", ") || NONE;
}

/** A table with a column for each shard, made again when shards come or go. */
class Matrix {
  constructor(title, head, of) {
    this.title = title;
    this.head = head;
    this.of = of; // of a shard, values by name
    this.region = h("div", { class: "wide", tabindex: "0", role: "region", "aria-label": title });
    this.summary = h("summary", {}, title);
    this.element = h("details", { class: "panel" }, this.summary, this.region);
  }

  update(all) {
    const indexes = all.map((one) => one.index);
    fill(this.region, JSON.stringify(indexes), () => {
      const columns = indexes.map((index, i) => ({ head: `Shard ${index}`, num: true, cell: (row) => count(row.values[i]) }));
      this.table = new Table(this.title, [{ head: this.head, cell: (row) => row.name }, ...columns]);
      return this.table.element;
    });
    const names = [...new Set(all.flatMap((one) => Object.keys(this.of(one) ?? {})))];
    names.sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
    this.table.update(names.map((name) => ({ name, values: all.map((one) => this.of(one)?.[name]) })));
    if (this.decided === undefined && names.length) {
      this.decided = true;
      this.element.open = names.length <= MANY;
    }
  }
}

const rows = new Matrix("Rows by table", "Table", (one) => one.rows);
const clocks = new Matrix("Clock by partition", "Partition", (one) => one.clock);

const panel = (...content) => h("div", { class: "panel" }, ...content);
const word = h("p", { class: "notice", hidden: true });
const parts = h("div", { class: "stack" },
  panel(shards.element),
  h("div", { class: "columns" }, rows.element, clocks.element),
  h("div", { class: "columns" }, panel(workers.element), panel(servers.element)));

export function showCluster({ process, cluster, clusterError }) {
  const body = byId("cluster-body");
  if (!body.firstChild) body.append(word, parts);
  const text = !process ? ""
    : !process.cluster ? "No coordinator is configured, so shards, workers and other servers are not known here. The rest of this page is what this server knows by itself; charts begin when the page is opened."
    : !clusterError ? ""
    : cluster ? `What is shown is of ${moment(cluster.time)}, as the coordinator is unreachable.` : "Nothing is known of the cluster while the coordinator is away.";
  word.hidden = !text;
  setText(word, text);
  parts.hidden = !cluster;
  parts.classList.toggle("old", Boolean(clusterError));
  if (cluster) {
    const all = cluster.shards ?? [];
    shards.update(all);
    rows.update(all);
    clocks.update(all);
    workers.update(cluster.workers ?? []);
    servers.update((cluster.servers ?? []).map((one) => ({ ...one, fresh: freshnessOf(one, cluster.time) })));
  }
}

const reasons = new Table("Samples refused, by reason", [
  { head: "Reason", cell: (one) => one[0] },
  { head: "Samples", num: true, cell: (one) => count(one[1]) },
  { head: "Field", cell: (one) => one[2]?.field || NONE },
  { head: "For example", num: true, cell: (one) => (one[2] ? `${one[2].partition}:${one[2].offset}` : NONE) },
], "none");
const hint = h("p", { class: "hint" }, "");
const dead = h("div", { class: "readout" }, h("span", {}, h("b")));
const letters = h("div", { class: "panel chart", id: "dead-letters" },
  h("div", { class: "head" }, h("h3", {}, "Dead letters"), dead), reasons.element, hint);

export function showDeadLetters({ cluster }) {
  if (!letters.isConnected) byId("charts").append(letters);
  const known = cluster?.dead_letters;
  const examples = cluster?.dead_letter_examples ?? {};
  const listed = Object.entries(known ?? {}).sort((a, b) => b[1] - a[1]).map(([reason, samples]) => [reason, samples, examples[reason]]);
  const place = listed.find((one) => one[2])?.[2];
  setText(hint, place ? `streamtrain deadletters show ${place.partition}:${place.offset} shows the message.` : "");
  setText(dead.firstChild.firstChild, known ? count(sum(known)) : NONE);
  setText(reasons.empty, known ? "none" : "known with a coordinator");
  reasons.update(listed);
}
