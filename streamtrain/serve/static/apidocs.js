// The API, as openapi.json describes it: every operation with its parameters, a body to start from, and a way to try it.

import { KEPT, model } from "./api.js";
import { byId, h, setText } from "./dom.js";

const METHODS = ["get", "post", "put", "delete"];
const DEEPEST = 6; // of examples, whose schemas may refer to themselves

let document_ = null, shown = "";

const token = () => sessionStorage.getItem(KEPT);
const authorization = () => (token() ? { authorization: `Bearer ${token()}` } : {});

/** A schema without references. */
function resolve(schema) {
  const found = schema?.$ref?.match(/^#\/components\/schemas\/(.+)$/);
  return found ? document_.components?.schemas?.[decodeURIComponent(found[1])] ?? {} : schema ?? {};
}

/** A value of a schema, to start from. */
export function exampleOf(given, depth = 0) {
  const schema = resolve(given);
  for (const known of [schema.example, schema.examples?.[0], schema.default, schema.const, schema.enum?.[0]])
    if (known !== undefined) return known;
  const choice = schema.anyOf ?? schema.oneOf ?? schema.allOf;
  if (choice) return exampleOf(choice.find((one) => one.type !== "null") ?? choice[0], depth);
  if (schema.properties || schema.type === "object") {
    const needed = Object.entries(schema.properties ?? {})
      .filter(([name]) => !schema.required || schema.required.includes(name) || depth < 2);
    return depth > DEEPEST ? {} : Object.fromEntries(needed.map(([name, one]) => [name, exampleOf(one, depth + 1)]));
  }
  if (schema.type === "array") return depth > DEEPEST ? [] : [exampleOf(schema.items, depth + 1)];
  return { integer: schema.minimum ?? 1, number: schema.minimum ?? 1.5, boolean: false, null: null }[schema.type] ?? "text";
}

function typeOf(given) {
  const schema = resolve(given);
  const choice = schema.anyOf ?? schema.oneOf;
  if (choice) return [...new Set(choice.map(typeOf))].join(" or ");
  return schema.type === "array" ? `list of ${typeOf(schema.items)}` : [schema.type].flat().join(" or ") || "any";
}

function fieldOf(parameter, id) {
  const value = parameter.in === "path" && parameter.name === "name" ? model : "";
  const input = h("input", { id, value, autocomplete: "off", spellcheck: "false", required: Boolean(parameter.required) });
  const said = [parameter.in, typeOf(parameter.schema), parameter.required ? "required" : "", parameter.description ?? ""];
  return { parameter, input, element: h("p", { class: "field" },
    h("label", { for: id }, parameter.name), input, h("span", { class: "hint" }, said.filter(Boolean).join(", "))) };
}

function operation(path, method, about, id) {
  const fields = (about.parameters ?? []).map((one, i) => fieldOf(one, `${id}-${i}`));
  const content = about.requestBody?.content?.["application/json"];
  const body = content && h("textarea", { id: `${id}-body`, rows: "8", spellcheck: "false" });
  if (body) body.value = JSON.stringify(exampleOf(content.schema), null, 2);
  const outcome = h("pre", { role: "status", hidden: true, tabindex: "0" });
  const answers = Object.entries(about.responses ?? {}).map(([status, one]) =>
    h("div", {}, h("dt", {}, status), h("dd", {}, one.description ?? "")));
  const form = h("form", { class: "fields", onsubmit: (event) => {
    event.preventDefault();
    send(path, method, fields, body, outcome);
  } }, ...fields.map((one) => one.element),
  body && h("p", { class: "field" }, h("label", { for: body.id }, "Body"), body),
  h("p", { class: "actions" }, h("button", { type: "submit", class: "primary" }, "Send")));
  return h("details", { class: "panel operation" },
    h("summary", {}, h("b", {}, method.toUpperCase()), " ", h("code", {}, path), " ", about.summary ?? ""),
    h("div", { class: "stack" }, about.description && h("p", {}, about.description),
      about.security && h("p", { class: "hint" }, "Needs the admin token."), form, outcome,
      h("h3", {}, "Answers"), h("dl", { class: "facts" }, ...answers)));
}

async function send(path, method, fields, body, outcome) {
  const headers = { ...authorization() }, query = new URLSearchParams();
  let url = path;
  for (const { parameter, input } of fields) {
    if (parameter.in === "path") url = url.replace(new RegExp(`\\{${parameter.name}(:path)?\\}`), encodeURIComponent(input.value));
    else if (input.value && parameter.in === "header") headers[parameter.name] = input.value;
    else if (input.value && parameter.in === "query") query.set(parameter.name, input.value);
  }
  if (body) headers["content-type"] = "application/json";
  outcome.hidden = false;
  setText(outcome, "…");
  try {
    const asked = query.size ? `${url}?${query}` : url;
    const answer = await fetch(asked.replace(/^\//, ""), { method, headers, body: body?.value, cache: "no-store" });
    const text = await answer.text();
    const about = [...answer.headers].filter(([name]) => name.startsWith("x-")).map(([name, value]) => `${name}: ${value}\n`);
    setText(outcome, `${method.toUpperCase()} ${asked}\n${answer.status} ${answer.statusText}\n${about.join("")}\n${pretty(text)}`);
  } catch (error) {
    setText(outcome, `the endpoint does not answer: ${error.message}`);
  }
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

async function load() {
  const answer = await fetch("openapi.json", { headers: authorization(), cache: "no-store" }).catch(() => null);
  if (!answer?.ok) {
    setText(byId("about"), answer?.status === 401 ? "This server asks for its read token: type it in." : "The endpoint does not answer.");
    return;
  }
  const text = await answer.text();
  document_ = JSON.parse(text);
  setText(byId("about"), `${document_.info.description} Version ${document_.info.version}.`);
  if (text === shown) return; // what is open and typed in stays
  shown = text;
  const groups = new Map();
  for (const [path, item] of Object.entries(document_.paths))
    for (const method of METHODS.filter((one) => item[one])) {
      const tag = item[method].tags?.[0] ?? "other";
      groups.set(tag, [...(groups.get(tag) ?? []), [path, method, item[method]]]);
    }
  const sections = [...groups].map(([tag, operations], i) => h("section", { "aria-labelledby": `tag-${i}` },
    h("h2", { id: `tag-${i}` }, tag),
    h("div", { class: "stack" }, ...operations.map(([path, method, about], j) => operation(path, method, about, `op-${i}-${j}`)))));
  byId("operations").replaceChildren(...sections);
}

byId("token").value = token() ?? "";
byId("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const given = byId("token").value.trim();
  if (given) sessionStorage.setItem(KEPT, given);
  else sessionStorage.removeItem(KEPT);
  load();
});
load();
