// A heat map on a canvas: 61 layers of 256 experts are drawn in a few milliseconds.

import { h } from "./dom.js";
import { color } from "./theme.js";

/** Anchors of cividis (Nuñez, Anderton and Renslow, 2018), which looks the same to colour-blind people. */
const ANCHORS = [
  [0, 34, 78], [18, 53, 112], [59, 73, 108], [87, 93, 109], [112, 113, 115],
  [138, 134, 120], [165, 156, 116], [195, 179, 105], [225, 204, 85], [254, 232, 56],
];
const LEFT = 46;
const BOTTOM = 18;

/** Red, green and blue of a share from 0 to 1. */
export function cividis(share) {
  const place = Math.max(0, Math.min(1, share)) * (ANCHORS.length - 1);
  const low = Math.min(ANCHORS.length - 2, Math.floor(place));
  return ANCHORS[low].map((value, channel) => Math.round(value + (place - low) * (ANCHORS[low + 1][channel] - value)));
}

/** The gradient as CSS, for a legend. */
export function cividisGradient() {
  return `linear-gradient(to right, ${ANCHORS.map((rgb) => `rgb(${rgb.join(",")})`).join(",")})`;
}

/**
 * `describe(row, column)` gives the tip's text; `onChoose(row)` is called for a click or Enter. The map takes the
 * keyboard: arrows move a cursor.
 */
export class HeatMap {
  constructor({ label, describe, onChoose }) {
    this.describe = describe;
    this.onChoose = onChoose;
    this.canvas = h("canvas", { tabindex: "0", role: "img", "aria-label": label });
    this.element = h("div", { class: "heatmap" }, this.canvas);
    this.tip = h("div", { class: "tip", hidden: true, role: "status" });
    this.cells = new OffscreenCanvas(1, 1);
    this.cursor = null;
    this.canvas.addEventListener("mousemove", (event) => this.point(this.cellAt(event), event.clientX, event.clientY));
    this.canvas.addEventListener("mouseleave", () => this.point(null));
    this.canvas.addEventListener("blur", () => this.point(null));
    this.canvas.addEventListener("click", (event) => {
      const cell = this.cellAt(event);
      if (cell) this.onChoose(cell.row);
    });
    this.canvas.addEventListener("keydown", (event) => this.onKey(event));
  }

  /** `rows` are arrays of numbers, `names` label them, `most` is the value of the brightest colour. */
  draw({ rows, names, columnName, most, chosen }) {
    const started = performance.now();
    this.rows = rows;
    this.fit(rows.length, rows[0].length);
    const context = this.canvas.getContext("2d");
    context.setTransform(this.scale, 0, 0, this.scale, 0, 0);
    context.clearRect(0, 0, this.width, this.height);
    context.imageSmoothingEnabled = false;
    context.drawImage(this.paint(rows, most), LEFT, 0, this.width - LEFT, this.height - BOTTOM);
    this.drawAxes(context, names, columnName, chosen);
    this.element.dataset.drawMs = (performance.now() - started).toFixed(1);
  }

  remove() {
    this.tip.remove();
  }

  fit(numRows, numColumns) {
    this.scale = devicePixelRatio;
    this.numRows = numRows;
    this.numColumns = numColumns;
    this.cellHeight = Math.max(7, Math.min(22, Math.floor(560 / numRows)));
    this.width = Math.max(this.element.clientWidth || 600, LEFT + 3 * numColumns);
    this.height = this.cellHeight * numRows + BOTTOM;
    const [width, height] = [Math.round(this.width * this.scale), Math.round(this.height * this.scale)];
    if (this.canvas.width !== width || this.canvas.height !== height) {
      Object.assign(this.canvas, { width, height });
      Object.assign(this.canvas.style, { width: `${this.width}px`, height: `${this.height}px` });
    }
  }

  /** One pixel a cell. */
  paint(rows, most) {
    Object.assign(this.cells, { width: this.numColumns, height: this.numRows });
    const context = this.cells.getContext("2d");
    const image = context.createImageData(this.numColumns, this.numRows);
    rows.forEach((row, y) =>
      row.forEach((value, x) => {
        const [red, green, blue] = cividis(most ? value / most : 0);
        image.data.set([red, green, blue, 255], 4 * (y * this.numColumns + x));
      }),
    );
    context.putImageData(image, 0, 0);
    return this.cells;
  }

  drawAxes(context, names, columnName, chosen) {
    context.fillStyle = color("quiet");
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    const every = Math.ceil(12 / this.cellHeight);
    names.forEach((name, row) => {
      if (row % every === 0) context.fillText(name, 2, (row + 0.5) * this.cellHeight);
    });
    const step = [1, 2, 4, 8, 16, 32, 64].find((candidate) => (candidate * (this.width - LEFT)) / this.numColumns > 44) ?? 128;
    for (let column = 0; column < this.numColumns; column += step) {
      const text = column === 0 ? `${columnName} 0` : String(column);
      context.fillText(text, LEFT + (column * (this.width - LEFT)) / this.numColumns, this.height - BOTTOM / 2);
    }
    if (chosen !== null && chosen < this.numRows) {
      context.strokeStyle = color("accent");
      context.lineWidth = 2;
      context.strokeRect(LEFT, chosen * this.cellHeight, this.width - LEFT - 1, this.cellHeight);
    }
  }

  cellAt(event) {
    const box = this.canvas.getBoundingClientRect();
    const column = Math.floor(((event.clientX - box.left - LEFT) * this.numColumns) / (this.width - LEFT));
    const row = Math.floor((event.clientY - box.top) / this.cellHeight);
    const isInside = row >= 0 && row < this.numRows && column >= 0 && column < this.numColumns;
    return isInside ? { row, column } : null;
  }

  point(cell, x = 0, y = 0) {
    this.tip.hidden = cell === null;
    if (cell === null) return;
    if (!this.tip.isConnected) document.body.append(this.tip);
    this.tip.textContent = this.describe(cell.row, cell.column);
    const left = Math.min(x + 14, innerWidth - this.tip.offsetWidth - 8);
    Object.assign(this.tip.style, { left: `${left}px`, top: `${Math.min(y + 14, innerHeight - this.tip.offsetHeight - 8)}px` });
  }

  onKey(event) {
    const move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (move) {
      const { row, column } = this.cursor ?? { row: 0, column: -1 };
      this.cursor = {
        row: Math.max(0, Math.min(this.numRows - 1, row + move[0])),
        column: Math.max(0, Math.min(this.numColumns - 1, column + move[1])),
      };
      const box = this.canvas.getBoundingClientRect();
      const x = box.left + LEFT + ((this.cursor.column + 0.5) * (this.width - LEFT)) / this.numColumns;
      this.point(this.cursor, x, box.top + (this.cursor.row + 0.5) * this.cellHeight);
    } else if (event.key === "Enter" && this.cursor) this.onChoose(this.cursor.row);
    else return;
    event.preventDefault();
  }
}
