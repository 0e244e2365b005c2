// Small pieces of DOM. Text is always set as text, so nothing that the server says is read as HTML.

export const byId = (id) => document.getElementById(id);

/** An element with attributes (and `onclick`-like listeners) and children, which are nodes or texts. */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child != null));
  return element;
}

export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Puts into a container what `build` gives, but only when `key` has changed: what is there keeps focus and selection. */
export function fill(container, key, build) {
  if (container.dataset.key === key) return;
  container.dataset.key = key;
  container.replaceChildren(...[build()].flat());
}

/** Pairs of a term and its value, in a `dl` that is changed in place. */
export function pairs(list, items) {
  fill(list, JSON.stringify(items.map(([term]) => term)), () =>
    items.map(([term]) => h("div", {}, h("dt", {}, term), h("dd"))));
  items.forEach(([, value, tone], i) => {
    const dd = list.children[i].lastChild;
    setText(dd, value);
    dd.className = tone ?? "";
  });
}

/**
 * A table that is changed in place. On a phone each row becomes a card; its roles are written out, as `display: block`
 * would take them away.
 *
 * A column has a `head`, a `cell` (row => text, or => node together with `key`: row => text that names the node), and
 * `num` where its cells are numbers.
 */
export class Table {
  constructor(caption, columns, empty = "none") {
    this.columns = columns;
    this.empty = h("p", { class: "hint" }, empty);
    this.body = h("tbody", { role: "rowgroup" });
    const heads = columns.map((one) =>
      h("th", { role: "columnheader", scope: "col", class: one.num ? "num" : null },
        one.hidden ? h("span", { class: "unseen" }, one.head) : one.head));
    this.table = h("table", { role: "table" },
      h("caption", {}, caption),
      h("thead", { role: "rowgroup" }, h("tr", { role: "row" }, heads)),
      this.body);
    this.element = h("div", { class: "table" }, this.table, this.empty);
  }

  update(rows) {
    this.empty.hidden = rows.length > 0;
    while (this.body.children.length > rows.length) this.body.lastChild.remove();
    rows.forEach((row, i) => this.#write(this.body.children[i] ?? this.#add(), row));
  }

  #add() {
    const cells = this.columns.map((one, i) =>
      h(i ? "td" : "th", {
        role: i ? "cell" : "rowheader", scope: i ? null : "row", class: one.num ? "num" : null,
        "data-head": one.hidden ? null : one.head,
      }));
    return this.body.appendChild(h("tr", { role: "row" }, cells));
  }

  #write(element, row) {
    this.columns.forEach((one, i) => {
      const cell = element.children[i];
      if (one.key) fill(cell, one.key(row), () => one.cell(row));
      else setText(cell, one.cell(row));
      if (one.tone) cell.dataset.tone = one.tone(row) ?? "";
    });
  }
}
