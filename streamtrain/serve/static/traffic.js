// Traffic: which share of the requests each arm gets, and controls that need the admin token.

import { ask } from "./api.js";
import { confirmThen } from "./confirm.js";
import { byId, setText, Table } from "./dom.js";
import { count, NONE } from "./format.js";
import { control } from "./versions.js";

const numbers = new Intl.NumberFormat("en", { maximumFractionDigits: 2 });
const percent = (x) => `${numbers.format(x)} %`;

let shown = ""; // weights that the form was filled with

function stateOf(arm) {
  if (arm.stopped != null) return ["bad", `stopped by the watchdog: ${arm.stopped}`];
  if (arm.version == null) return ["warn", "not loaded: its requests go to what is served"];
  if (arm.name === "prod") return ["good", "served"];
  if (!arm.weight) return ["", "gets no requests"];
  return arm.checked == null ? ["", "not checked yet"] : ["good", `checked with publication ${count(arm.checked)}`];
}

const table = new Table("Arms", [
  { head: "Arm", cell: (arm) => arm.name },
  { head: "Weight", num: true, cell: (arm) => percent(arm.weight) },
  { head: "Observed", num: true, cell: (arm) => (arm.all ? percent((100 * (arm.requests + arm.failures)) / arm.all) : NONE) },
  { head: "Predicted", num: true, cell: (arm) => count(arm.requests) },
  { head: "Failed", num: true, cell: (arm) => count(arm.failures), tone: (arm) => (arm.failures ? "bad" : "") },
  { head: "Version", cell: (arm) => arm.version ?? NONE },
  { head: "State", cell: (arm) => stateOf(arm)[1], tone: (arm) => stateOf(arm)[0] },
]);

/** "prod=95 canary=5" as an object; throws an Error that says what is wrong. */
export function weightsOf(text) {
  const pairs = text.trim().split(/[\s,]+/).filter(Boolean).map((one) => {
    const at = one.lastIndexOf("=");
    const weight = one.slice(at + 1).replace(/%$/, "");
    if (at < 1 || weight === "" || !Number.isFinite(Number(weight)))
      throw new Error(`A weight is ARM=PERCENT, such as canary=5, not ${one}.`);
    return [one.slice(0, at), Number(weight)];
  });
  if (new Set(pairs.map(([arm]) => arm)).size < pairs.length) throw new Error("Every arm has one weight.");
  return Object.fromEntries(pairs);
}

export function startTraffic() {
  byId("traffic-body").append(table.element);
  byId("traffic-form").addEventListener("submit", (event) => {
    event.preventDefault();
    const text = byId("traffic-weights").value, mirror = byId("traffic-mirror").value.trim() || "none";
    let weights;
    try {
      weights = weightsOf(text);
    } catch (error) {
      setText(byId("traffic-outcome"), error.message);
      byId("traffic-weights").focus();
      return;
    }
    confirmThen({
      title: "Divide requests like this?", yes: "Set the weights", forced: "Set them even so", outcome: "traffic-outcome",
      text: `${text.trim()}; ${mirror === "none" ? "no mirror" : `mirror ${mirror}`}. All servers of this model follow.`,
      act: (body) => ask(":traffic", { method: "POST", token: control().token, body: { ...body, weights, mirror } }),
      done: (json) => `Requests are now divided: ${written(json.weights)}.`,
    });
  });
}

const written = (weights) => Object.entries(weights).map(([arm, weight]) => `${arm}=${weight}`).join(" ");

/** Called with every look at the process. */
export function showTraffic({ process }) {
  const traffic = process?.traffic, { accepted } = control();
  byId("traffic").hidden = byId("to-traffic").hidden = !traffic && !accepted;
  byId("traffic-form").hidden = !process?.control;
  byId("traffic-set").disabled = !accepted;
  table.element.hidden = !traffic;
  const arms = traffic?.arms ?? [];
  const all = arms.reduce((total, one) => total + one.requests + one.failures, 0);
  table.update(arms.map((one) => ({ ...one, all })));
  const how = process?.control && !accepted ? " To change the weights, give the admin token under Versions." : "";
  setText(byId("traffic-about"), traffic
    ? `Requests are counted in this process, since the weights last changed.${how}` : "All requests go to what is served.");
  const mirror = traffic?.mirror;
  setText(byId("traffic-copies"), mirror ? `${mirror.name} gets a copy of every request${mirror.version == null ? ", but is not loaded" : ""}: `
    + `${count(mirror.compared)} compared, ${count(mirror.dropped)} dropped, ${count(mirror.failed)} failed.` : "");
  const now = [written(Object.fromEntries(arms.map((one) => [one.name, one.weight]))) || "prod=100", mirror?.name ?? ""];
  if (JSON.stringify(now) !== shown) { // what is being typed is left alone until the traffic changes
    shown = JSON.stringify(now);
    [byId("traffic-weights").value, byId("traffic-mirror").value] = now;
  }
}
