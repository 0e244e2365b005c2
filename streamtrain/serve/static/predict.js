// The form of a prediction, built from the schema, and what its answer rests on.

import { ask, model } from "./api.js";
import { byId, fill, h, setText } from "./dom.js";
import { count, moment, span, value } from "./format.js";
import { lookUp } from "./rows.js";

let fields = [];

export function startPredict() {
  byId("predict-form").addEventListener("submit", (event) => {
    event.preventDefault();
    predict();
  });
}

/** Builds the form when the fields are known, once. */
export function showForm({ process }) {
  if (!process) return;
  fields = process.fields;
  fill(byId("predict-form"), JSON.stringify(fields), () => [
    ...fields.map((one, i) => inputOf(one, i)),
    h("p", { class: "actions" },
      h("button", { type: "submit", class: "primary" }, "Predict"),
      h("button", { type: "reset" }, "Clear")),
  ]);
}

function inputOf(field, i) {
  const hint = field.ids
    ? (field.max_ids === 1 ? "an id" : field.max_ids ? `ids, with commas; the last ${field.max_ids} count` : "an id, or several with commas")
    : "a number";
  const must = field.required ? "" : "; may be empty";
  return h("p", { class: "field" },
    h("label", { for: `field-${i}` }, field.name),
    h("input", {
      id: `field-${i}`, name: field.name, autocomplete: "off", spellcheck: "false",
      inputmode: field.ids ? null : "decimal", required: field.required && !field.ids,
      placeholder: field.default == null ? null : `${field.default}`,
      "aria-describedby": `hint-${i}`,
    }),
    h("span", { class: "hint", id: `hint-${i}` }, hint + must));
}

/** Ids of a text with commas; in double quotes a comma is one. Without any comma it is a single id. */
export function idsOf(text) {
  const ids = [...text.matchAll(/\s*(?:"((?:[^"]|"")*)"|([^,]*))\s*(?:,|$)/g)]
    .map(([, quoted, plain]) => (quoted === undefined ? plain.trim() : quoted.replaceAll('""', '"')))
    .filter((one) => one !== "");
  return ids.length === 1 && !text.trimEnd().endsWith(",") ? ids[0] : ids;
}

class BadField extends Error {
  constructor(field, message) {
    super(message);
    this.field = field;
  }
}

function instance() {
  const made = {};
  fields.forEach((field, i) => {
    const text = byId(`field-${i}`).value;
    if (text.trim() === "" && !field.required) return;
    if (field.ids) {
      made[field.name] = idsOf(text);
      return;
    }
    const number = Number(text);
    if (text.trim() === "" || !Number.isFinite(number)) throw new BadField(field.name, `${field.name} must be a number`);
    made[field.name] = number;
  });
  return made;
}

async function predict() {
  const result = byId("predict-result");
  fields.forEach((_, i) => byId(`field-${i}`).removeAttribute("aria-invalid"));
  try {
    const body = { instances: [instance()] };
    const answer = await ask(":predict", { method: "POST", body });
    const explained = (await ask(":explain", { method: "POST", body })).json;
    result.replaceChildren(...shown(answer, explained, body));
  } catch (error) {
    result.replaceChildren(h("p", { class: "outcome bad" }, error.message));
    mark(error.field ?? /in field '([^']*)'/.exec(error.message)?.[1]);
  }
}

function mark(name) {
  const i = fields.findIndex((one) => one.name === name);
  if (i < 0) return;
  byId(`field-${i}`).setAttribute("aria-invalid", "true");
  byId(`field-${i}`).focus();
}

function shown({ json, headers }, explained, body) {
  const [first] = json.predictions;
  const outputs = Array.isArray(first) ? [["prediction", first[0]]] : Object.entries(first).map(([label, [one]]) => [label, one]);
  const through = headers.get("x-trained-through"), fresh = headers.get("x-freshness-ms");
  const about = [
    ["Version", headers.get("x-model-version")],
    ["Publication", count(Number(headers.get("x-publication")))],
    ["Trained through", moment(through ? Date.parse(through) / 1000 : null)],
    ["Freshness", span(fresh == null ? null : Number(fresh) / 1000)],
  ];
  const moved = explained.publication === Number(headers.get("x-publication")) ? null
    : h("p", { class: "hint" }, `The rows are of publication ${count(explained.publication)}, which came meanwhile.`);
  return [
    h("dl", { class: "predictions" }, outputs.map(([label, one]) => h("div", {}, h("dt", {}, label), h("dd", {}, value(one))))),
    h("dl", { class: "facts" }, about.map(([term, text]) => h("div", {}, h("dt", {}, term), h("dd", {}, text)))),
    hits(explained.features),
    moved,
    h("details", {}, h("summary", {}, "The same with curl"), h("pre", { tabindex: "0" }, curl(body))),
  ].filter(Boolean);
}

function hits(features) {
  const all = features.flatMap((one) => one.ids);
  const found = all.filter((one) => one.found).length;
  return h("div", { class: "hits" },
    h("h3", {}, "Rows that it read"),
    h("p", { class: "hint" }, `${found} of ${all.length} ids have a row; the others read their birth value.`),
    h("dl", {}, features.map((one) => h("div", {},
      h("dt", {}, one.feature),
      h("dd", {}, one.ids.length ? one.ids.map((id) => chip(one.table, id)) : h("span", { class: "hint" }, "no ids"))))));
}

function chip(table, { id, cell, key, found, norm }) {
  const text = id ?? cell ?? `key ${key}`;
  const content = [h("span", { class: "id" }, text), h("em", {}, found ? `row, norm ${value(norm)}` : "birth value")];
  const look = { class: "chip", "data-found": `${found}` };
  if (id == null) return h("span", look, content);
  return h("button", { ...look, type: "button", title: `Look ${id} up in ${table}`, onclick: () => lookUp(table, id) }, content);
}

function curl(body) {
  const data = JSON.stringify(body).replaceAll("'", "'\\''");
  const url = new URL(`v1/models/${encodeURIComponent(model)}:predict`, document.baseURI);
  return `curl -X POST '${url}' -d '${data}'`;
}
