// Building elements. Everything that comes from a server goes in as text, never as markup.

/** An element with attributes (on* are listeners, `class`, `data-*`, properties such as `disabled`) and children. */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(element.style, value);
    else if (value === true) element.setAttribute(name, "");
    else element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

/** A card with a heading; `span` is its width in twelfths of the page. */
export function card(title, span, ...children) {
  return h("section", { class: span === 12 ? "card" : `card span-${span}` }, h("h2", {}, title), ...children);
}

/** What is not there, and why. */
export function greyedOut(title, reason, span = 12) {
  return h("section", { class: `card off${span === 12 ? "" : ` span-${span}`}` }, h("h2", {}, title), h("div", {}, reason));
}

/**
 * A table. Columns are {title, number?, cell(row)}; `onChoose(row)` makes rows choosable by mouse and keyboard;
 * `isChosen(row)` marks one.
 */
export function table(columns, rows, { onChoose, isChosen = () => false, empty = "nothing yet" } = {}) {
  if (!rows.length) return h("div", { class: "empty" }, empty);
  const side = (column) => (column.number ? "number" : undefined);
  const body = rows.map((row) => {
    const cells = columns.map((column) => h("td", { class: side(column) }, column.cell(row)));
    if (!onChoose) return h("tr", {}, cells);
    return h(
      "tr",
      {
        class: isChosen(row) ? "choosable chosen" : "choosable",
        tabindex: "0",
        onclick: () => onChoose(row),
        onkeydown: (event) => {
          if (event.key === "Enter" || event.key === " ") {
            event.preventDefault();
            onChoose(row);
          }
        },
      },
      cells,
    );
  });
  const head = columns.map((column) => h("th", { class: side(column), scope: "col" }, column.title));
  return h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, head)), h("tbody", {}, body)));
}

/** A bar filled to `share` (0 to 1). */
export function meter(share, label, color) {
  const filled = Math.max(0, Math.min(1, share || 0));
  return h(
    "div",
    { class: "meter", role: "meter", "aria-valuenow": filled.toFixed(3), "aria-valuemin": "0", "aria-valuemax": "1", "aria-label": label },
    h("span", { style: { width: `${100 * filled}%`, ...(color ? { background: color } : {}) } }),
  );
}

/** Parts of a whole side by side, with a legend; parts are {name, value, color}. */
export function stack(parts, format) {
  const total = parts.reduce((sum, part) => sum + part.value, 0) || 1;
  const bar = parts.map((part) =>
    h("span", { title: `${part.name}: ${format(part.value)}`, style: { width: `${(100 * part.value) / total}%`, background: part.color } }),
  );
  const legend = parts.map((part) =>
    h("span", { class: "quiet" }, h("span", { class: "key", style: { background: part.color } }), `${part.name} ${format(part.value)}`),
  );
  return h("div", {}, h("div", { class: "stack" }, bar), h("div", { class: "row", style: { marginTop: "4px" } }, legend));
}

/** A large number with its unit; `text` is what format.js returns. */
export function figure(text, note = "") {
  const [number, ...unit] = text.split(" ");
  return h("div", {}, h("div", { class: "big" }, number, h("span", { class: "unit" }, unit.join(" "))), h("div", { class: "quiet" }, note));
}
