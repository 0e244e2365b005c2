// Versions: what can be served, and controls that need the admin token.

import { ask, KEPT } from "./api.js";
import { confirmThen } from "./confirm.js";
import { byId, h, setText, Table } from "./dom.js";
import { byLabel, bytes, count, moment, NONE, sum } from "./format.js";

const EVERY_MS = 10_000;

let token = sessionStorage.getItem(KEPT) ?? "";
let accepted = false;
let refused = false; // the server has said that the token is wrong: it is not asked again with it
let listed = null; // what the server said last; null: nothing yet
let seen = ""; // of the process, when it was asked last
let asked = 0;
let latest = null;

const versionOf = (one) => (one.version == null ? "head" : `${one.version}`);
const stateOf = (one) => (one.served ? "served" : one.resident ? "loaded" : NONE);

const table = new Table("Versions that can be served", [
  { head: "Version", cell: versionOf },
  { head: "State", cell: stateOf, tone: (one) => (one.served ? "good" : "") },
  { head: "Labels", cell: (one) => one.labels?.join(", ") || NONE },
  { head: "Publication", num: true, cell: (one) => count(one.number) },
  { head: "Trained through", num: true, cell: (one) => moment(one.watermark || null) },
  { head: "Rows", num: true, cell: (one) => count(sum(one.rows)) },
  { head: "Memory", num: true, cell: (one) => bytes(one.bytes) },
  { head: "AUC", num: true, cell: (one) => byLabel(one.metrics, "auc") },
  { head: "Log loss", num: true, cell: (one) => byLabel(one.metrics, "log_loss") },
  {
    head: "Promote", hidden: true,
    key: (one) => JSON.stringify([versionOf(one), one.served, accepted]),
    cell: (one) => (one.served ? [] : h("button", {
      type: "button", disabled: !accepted, "aria-label": `Promote ${versionOf(one)}`,
      onclick: () => confirmPromotion(versionOf(one)),
    }, "Promote")),
  },
], "There is no version yet.");

const history = new Table("History", [
  { head: "When", cell: (one) => moment(one.at) },
  { head: "What", cell: (one) => one.what },
  { head: "Version", num: true, cell: (one) => (one.version == null ? NONE : `${one.version}`) },
  { head: "Label", cell: (one) => one.label || NONE },
  { head: "Who", cell: (one) => one.who || NONE },
  { head: "Why", cell: (one) => one.why || NONE },
]);

export function startVersions() {
  byId("versions-body").append(table.element);
  byId("token").value = token;
  byId("token-form").addEventListener("submit", (event) => {
    event.preventDefault();
    keep(byId("token").value.trim());
  });
  byId("forget").addEventListener("click", () => {
    byId("token").value = "";
    keep("");
  });
  byId("rollback").addEventListener("click", () => serveOther({
    title: "Roll back?", yes: "Roll back",
    text: `Served now: ${latest?.served ?? "nothing"}. What was served before is served again; it is still loaded.`,
    act: (body) => ask(":rollback", { method: "POST", body, token }),
  }));
  byId("confirm-no").addEventListener("click", () => byId("confirm").close());
}

/** The token, and whether the server has accepted it. */
export const control = () => ({ token, accepted });

function keep(given) {
  token = given;
  accepted = refused = false;
  listed = null;
  if (token) sessionStorage.setItem(KEPT, token);
  else sessionStorage.removeItem(KEPT);
  setText(byId("versions-outcome"), "");
  say("");
  refresh();
}

function say(text, tone = "") {
  const state = byId("token-state");
  setText(state, text);
  state.className = `hint ${tone}`;
}

/** Asks for the versions, if there is a token that may. */
async function refresh() {
  asked = Date.now();
  if (!token || refused || !latest?.control) return draw();
  const mine = token;
  try {
    const { json } = await ask("/versions", { token });
    if (mine !== token) return;
    accepted = true;
    listed = json;
    say("The token is accepted. It is kept until this tab is closed.", "good");
  } catch (error) {
    if (mine !== token) return;
    if (error.status === 401) {
      accepted = false;
      refused = true;
      listed = null;
      say(latest.locked ? "This token may read, but not promote: it is not the admin token."
        : "Wrong token: the server does not accept it.", latest.locked ? "" : "bad");
    } else say(error.message, "bad");
  }
  draw();
}

/** Called with every look at the process. */
export function showVersions({ process, locked }) {
  latest = process && { ...process, locked };
  if (!process) {
    if (locked) byId("token-form").hidden = false;
    return;
  }
  byId("token-form").hidden = !process.control && !locked;
  byId("rollback").hidden = !process.control;
  setText(byId("rollback-hint"), process.control ? "Serves again what was served before."
    : "Control is off: set serve.admin_token to promote and roll back.");
  if (!token) say("To promote and roll back, and to see all versions.");
  const now = JSON.stringify([process.served, process.labels, process.loaded.map((one) => one.version)]);
  if (now !== seen || Date.now() - asked > EVERY_MS) {
    seen = now;
    refresh();
  } else draw();
}

function draw() {
  const served = latest?.served;
  const all = listed ? [...listed.versions].reverse() : (latest?.loaded ?? []).filter((one) => one.version !== "head")
    .map((one) => ({ ...one, version: Number(one.version), number: one.publication, resident: true }))
    .sort((a, b) => b.version - a.version);
  const labels = Object.entries(latest?.labels ?? {});
  const held = (version) => latest?.loaded.find((one) => one.version === version);
  const head = held("head");
  const rows = all.map((one) => ({
    ...one, served: served === versionOf(one), bytes: one.bytes ?? held(versionOf(one))?.bytes,
    labels: one.labels ?? labels.filter(([, version]) => version === one.version).map(([label]) => label),
  }));
  if (head) rows.unshift({ ...head, version: null, number: head.publication, resident: true, served: served === "head", labels: [] });
  table.update(rows);
  byId("rollback").disabled = !accepted;
  const deeds = listed?.history;
  if (deeds?.length && !history.element.isConnected) byId("history-body").append(history.element);
  if (deeds) history.update(deeds);
}

function confirmPromotion(version) {
  serveOther({
    title: `Serve ${version === "head" ? "the head" : `version ${version}`}?`, yes: "Promote",
    text: `Served now: ${latest?.served ?? "nothing"}. The other is loaded, checked and tried first; no request fails.`,
    act: (body) => ask(":promote", {
      method: "POST", token, body: { ...body, version: version === "head" ? version : Number(version) },
    }),
  });
}

function serveOther(asked) {
  confirmThen({
    ...asked, forced: "Serve it even so", outcome: "versions-outcome",
    done: (json) => {
      refresh();
      const served = json.served === "head" ? "the head" : `version ${json.served}`;
      return `Now ${served} is served (publication ${count(json.publication.number)}).`;
    },
  });
}
