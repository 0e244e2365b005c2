// The console: asks the server for its state every second, and shows it.

import { ask } from "./api.js";
import { Charts, WINDOW_S } from "./charts.js";
import { showCluster, showDeadLetters } from "./cluster.js";
import { showCompare, startCompare } from "./compare.js";
import { byId, fill, h, pairs } from "./dom.js";
import { byLabel, count, moment, NONE, rate, span } from "./format.js";
import { showForm, startPredict } from "./predict.js";
import { showTables, startRows } from "./rows.js";
import { showTraffic, startTraffic } from "./traffic.js";
import { showVersions, startVersions } from "./versions.js";

const EVERY_MS = 1000;
const GAP_S = 5; // without a look at the process, as while the page is hidden: no line is drawn across
const MANY_LEFT = 3; // workers that have left in two minutes, if these are also more than there are: no mere restart
const AWAY_MS = 3000; // a coordinator that is away is asked less often

const state = { process: null, cluster: null, clusterError: "", answered: null, away: "", clusterAt: 0, locked: false };
const points = []; // what this page has seen of the process itself, for when no cluster tells its history
const learned = { number: null, at: 0, samples: 0, rate: null };

/** How fast the head advances, from its clock at two publications. */
function rateOf(head) {
  if (!head) return null;
  if (learned.number !== null && head.publication > learned.number && head.published > learned.at) {
    const perSecond = (head.learned - learned.samples) / (head.published - learned.at);
    learned.rate = perSecond >= 0 ? perSecond : null;
  }
  if (learned.number !== head.publication)
    Object.assign(learned, { number: head.publication, at: head.published, samples: head.learned });
  return learned.rate;
}

const ofLabels = (metrics, name) => Object.fromEntries(Object.entries(metrics ?? {}).map(([label, one]) => [label, one[name] ?? null]));
const loaded = (process, version) => process?.loaded.find((one) => one.version === version);

/** How long ago the latest event was that the served model has learned, in seconds; shown under one name everywhere. */
const freshnessOf = (served, process) => (served?.watermark ? process.time - served.watermark : null);

function remember(process) {
  const head = loaded(process, "head") ?? loaded(process, process.served);
  const served = loaded(process, process.served);
  if (points.length && process.time - points.at(-1).time > GAP_S) points.push({ time: process.time - 1 });
  points.push({
    time: process.time, samples_per_s: rateOf(head), lag: null,
    freshness_ms: freshnessOf(served, process) === null ? null : 1000 * freshnessOf(served, process),
    auc: ofLabels(head?.metrics, "auc"), log_loss: ofLabels(head?.metrics, "log_loss"),
  });
  while (points[0].time < process.time - WINDOW_S) points.shift();
}

async function look() {
  try {
    state.process = (await ask("/process")).json;
    state.answered = Date.now() / 1000;
    state.away = "";
    remember(state.process);
  } catch (error) {
    state.locked ||= error.status === 401; // from then on it is known that reading needs a token
    state.away = error.status === 401 ? `answers nobody without a token: type it in below, under Versions`
      : error.status ? `is away: ${error.message}` : "does not answer";
  }
  if (!state.away && state.process.cluster && Date.now() >= state.clusterAt) await lookAtCluster();
}

async function lookAtCluster() {
  try {
    state.cluster = (await ask("/cluster")).json;
    state.clusterError = "";
  } catch (error) {
    state.clusterError = error.message;
    state.clusterAt = Date.now() + AWAY_MS;
  }
}

/** Why nothing may be learned, in a sentence; "": nothing says so. */
function ailment(cluster) {
  if (!cluster) return "";
  if (cluster.workers_left >= MANY_LEFT && cluster.workers_left > (cluster.workers?.length ?? 0))
    return `Workers keep leaving: ${cluster.workers_left} in the last two minutes. Their log says why.`;
  return cluster.workers && !cluster.workers.length ? "No worker is running, so nothing is learned." : "";
}

function notices() {
  const { process, cluster, clusterError, away, answered } = state;
  const all = [];
  if (away) all.push(["bad", `The endpoint ${away}.${answered ? ` What is shown is of ${moment(answered)}.` : ""}`]);
  else if (process && process.served === null)
    all.push(["warn", `Nothing is loaded yet (${process.origin}). As soon as something is published, it is served and shown here.`]);
  else if (process && !["ok", "not followed"].includes(process.origin))
    all.push(["warn", `Where publications come from: ${process.origin}. What is loaded is served on.`]);
  if (!away && clusterError) all.push(["bad", `${clusterError[0].toUpperCase()}${clusterError.slice(1)}.`]);
  if (cluster?.held) all.push(["warn", `Publications are held back: ${cluster.held}`]);
  const ailing = !away && !clusterError && ailment(cluster);
  if (ailing) all.push(["bad", `${ailing} What is loaded is served on, and does not become fresher.`]);
  fill(byId("notices"), JSON.stringify(all), () => all.map(([tone, text]) => h("p", { class: `notice ${tone}` }, text)));
  const [tone, text] = away ? ["bad", "away"] : !process ? ["", "loading"] : process.served === null ? ["warn", "nothing loaded"]
    : ailing ? ["bad", "not learning"] : ["good", "serving"];
  const pill = byId("state");
  pill.className = `pill ${tone}`;
  if (pill.textContent !== text) pill.textContent = text;
  document.body.classList.toggle("stale", Boolean(away));
}

function facts() {
  const { process, cluster } = state;
  const served = loaded(process, process?.served);
  const head = loaded(process, "head");
  const calibration = byLabel(cluster?.figures ?? head?.metrics, "calibration");
  const checkpoint = cluster?.checkpoint;
  pairs(byId("facts"), [
    ["Served", process?.served ?? NONE],
    ["Publication", count(served?.publication)],
    ["Trained through", moment(served?.watermark)],
    ["Freshness", span(freshnessOf(served, process))],
    ...(cluster?.log_time ? [["Log delay", span(Math.max(0, cluster.time - cluster.log_time))]] : []),
    ["Samples/s", rate(cluster ? cluster.samples_per_s : learned.rate)],
    ["Samples learned", count(cluster?.samples ?? head?.learned)],
    ["Calibration", calibration],
    ["Checkpoint", checkpoint ? `epoch ${checkpoint.epoch}, ${moment(checkpoint.at)}` : NONE],
  ]);
}

/** The history, with the freshness of this moment as the latest point, so that its chart ends with what the facts say. */
function withLatest(history) {
  const here = points.at(-1);
  return here && here.time > history.at(-1).time
    ? [...history, { ...history.at(-1), time: here.time, freshness_ms: here.freshness_ms }] : history;
}

/** Links to the other models that this process serves. */
function models() {
  const others = (state.process?.models ?? []).filter((one) => one !== state.process.model);
  byId("models").hidden = !others.length;
  fill(byId("models"), JSON.stringify(others), () => ["also served: ", ...others.flatMap((one, i) =>
    [i ? ", " : "", h("a", { href: `?model=${encodeURIComponent(one)}` }, one)])]);
}

function show(charts) {
  models();
  notices();
  facts();
  const history = state.cluster?.history;
  const now = state.process?.time ?? Date.now() / 1000;
  charts.show(history?.length ? withLatest(history) : points, history?.length ? Math.max(now, history.at(-1).time) : now);
  showDeadLetters(state);
  showCluster(state);
  showVersions(state);
  showTraffic(state);
  showCompare(state);
  showForm(state);
  showTables(state);
}

async function run() {
  const charts = new Charts(byId("charts"));
  startVersions();
  startTraffic();
  startCompare();
  startPredict();
  startRows();
  show(charts);
  for (;;) {
    if (!document.hidden) {
      await look();
      show(charts);
    }
    await new Promise((done) => setTimeout(done, EVERY_MS));
  }
}

run();
