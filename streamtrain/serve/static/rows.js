// The row inspector: what an id reads in a table.

import { ask } from "./api.js";
import { byId, fill, h } from "./dom.js";
import { count, moment, NONE, value } from "./format.js";

const SHOWN = 64; // values that are written out

export function startRows() {
  byId("rows-form").addEventListener("submit", (event) => {
    event.preventDefault();
    look(byId("rows-table").value, byId("rows-id").value);
  });
}

export function showTables({ process }) {
  if (!process) return;
  fill(byId("rows-table"), JSON.stringify(process.tables), () =>
    process.tables.map((one) => h("option", { value: one.name }, one.name)));
}

/** Fills the form in, and submits it. */
export function lookUp(table, id) {
  byId("rows-table").value = table;
  byId("rows-id").value = id;
  byId("rows-id").focus();
  byId("rows").scrollIntoView({ block: "nearest" });
  look(table, id);
}

async function look(table, id) {
  const result = byId("rows-result");
  try {
    const { json } = await ask(`/rows/${encodeURIComponent(table)}/${encodeURIComponent(id)}`);
    result.replaceChildren(...shown(json));
  } catch (error) {
    result.replaceChildren(h("p", { class: "outcome bad" }, error.message));
  }
}

function shown(row) {
  const unknown = row.cluster === "ok" ? NONE : "not known";
  const facts = [
    ["Row", row.found ? "there" : "none: reads its birth value"],
    ["Norm", value(row.norm)],
    ["Learned", row.count == null ? unknown : `${count(row.count)} times`],
    ["Last seen", row.last_seen == null ? (row.cluster === "ok" && row.count != null ? "not kept" : unknown) : moment(row.last_seen)],
    ["Key", row.key],
  ];
  const more = row.values.length > SHOWN ? `, the first ${SHOWN} written out` : "";
  return [
    h("dl", { class: "facts" }, facts.map(([term, text]) => h("div", {}, h("dt", {}, term), h("dd", {}, text)))),
    row.cluster.startsWith("away") ? h("p", { class: "hint" }, `The coordinator is ${row.cluster}.`) : null,
    h("h3", {}, `${row.values.length} ${row.values.length === 1 ? "value" : "values"}${more}`),
    bars(row.values),
    h("ol", { class: "values" }, row.values.slice(0, SHOWN).map((one) => h("li", {}, value(one)))),
  ].filter(Boolean);
}

/** The values as bars around zero. */
function bars(values) {
  const space = "http://www.w3.org/2000/svg";
  const most = Math.max(...values.map(Math.abs)) || 1;
  const svg = document.createElementNS(space, "svg");
  svg.setAttribute("class", "bars");
  svg.setAttribute("viewBox", `0 -1 ${values.length} 2`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("aria-hidden", "true");
  values.forEach((one, i) => {
    const bar = document.createElementNS(space, "rect");
    const height = Math.max(Math.abs(one) / most, 0.01);
    const box = { x: i + 0.1, y: one < 0 ? 0 : -height, width: 0.8, height };
    Object.entries(box).forEach(([name, at]) => bar.setAttribute(name, at));
    svg.append(bar);
  });
  return svg;
}
