// The console: asks the server every second what is going on, and shows it.

import { ask } from "./api.js";
import { Charts, WINDOW_S } from "./charts.js";
import { showCluster, showDeadLetters } from "./cluster.js";
import { byId, fill, h, pairs } from "./dom.js";
import { byLabel, count, moment, NONE, rate, span } from "./format.js";
import { showForm, startPredict } from "./predict.js";
import { showTables, startRows } from "./rows.js";
import { showVersions, startVersions } from "./versions.js";

const EVERY_MS = 1000;
const GAP_S = 5; // without a look at the process, as while the page is hidden: no line is drawn across
const AWAY_MS = 3000; // a coordinator that is away is asked less often

const state = { process: null, cluster: null, clusterError: "", answered: null, away: "", clusterAt: 0, locked: false };
const points = []; // what this page has seen of the process itself, for when no cluster tells its history
const learned = { number: null, at: 0, samples: 0, rate: null };

/** How fast the head goes on, from its clock at two publications. */
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

function remember(process) {
  const head = loaded(process, "head") ?? loaded(process, process.served);
  const served = loaded(process, process.served);
  if (points.length && process.time - points.at(-1).time > GAP_S) points.push({ time: process.time - 1 });
  points.push({
    time: process.time, samples_per_s: rateOf(head), lag: null,
    freshness_ms: served?.watermark ? 1000 * (process.time - served.watermark) : null,
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
  fill(byId("notices"), JSON.stringify(all), () => all.map(([tone, text]) => h("p", { class: `notice ${tone}` }, text)));
  const [tone, text] = away ? ["bad", "away"] : !process ? ["", "loading"] : process.served === null ? ["warn", "nothing loaded"] : ["good", "serving"];
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
    ["Freshness", span(served?.watermark ? process.time - served.watermark : null)],
    ["Samples/s", rate(cluster ? cluster.samples_per_s : learned.rate)],
    ["Samples learned", count(cluster?.samples ?? head?.learned)],
    ["Calibration", calibration],
    ["Checkpoint", checkpoint ? `epoch ${checkpoint.epoch}, ${moment(checkpoint.at)}` : NONE],
  ]);
}

function show(charts) {
  notices();
  facts();
  const history = state.cluster?.history;
  const now = state.process?.time ?? Date.now() / 1000;
  charts.show(history?.length ? history : points, history?.length ? Math.max(now, history.at(-1).time) : now);
  showDeadLetters(state);
  showCluster(state);
  showVersions(state);
  showForm(state);
  showTables(state);
}

async function run() {
  const charts = new Charts(byId("charts"));
  startVersions();
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
