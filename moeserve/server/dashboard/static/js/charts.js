// Lines over time, drawn by uPlot.

import uPlot from "../vendor/uPlot.esm.js";
import { h } from "./dom.js";
import { clock as timeOfDay } from "./format.js";
import { color } from "./theme.js";

const LEGEND_HEIGHT = 34;

/**
 * A chart of the feed's points. `lines` are {label, read(point), color, dash?}; `format` writes a value with its unit;
 * `range` fixes the value axis.
 */
export class TimeChart {
  constructor({ lines, format, range }) {
    this.element = h("div", { class: "chart" });
    this.lines = lines;
    this.format = format;
    this.range = range;
    this.plot = null;
    new ResizeObserver(() => this.plot?.setSize(this.size())).observe(this.element);
  }

  draw(points) {
    const data = [points.map((point) => point.time), ...this.lines.map((line) => points.map(line.read))];
    if (this.plot) this.plot.setData(data);
    else if (this.element.clientWidth) this.plot = new uPlot(this.options(), data, this.element);
  }

  /** With the present colours. */
  recolor() {
    this.plot?.destroy();
    this.plot = null;
  }

  size() {
    return { width: this.element.clientWidth, height: this.element.clientHeight - LEGEND_HEIGHT };
  }

  options() {
    const axis = { stroke: color("quiet"), grid: { stroke: color("line"), width: 1 }, ticks: { stroke: color("line"), width: 1 } };
    const value = (_, raw) => (raw === null || raw === undefined ? "–" : this.format(raw));
    return {
      ...this.size(),
      series: [
        { label: "time", value: (_, raw) => timeOfDay(raw) },
        ...this.lines.map((line) => ({
          label: line.label,
          stroke: color(line.color),
          width: 2,
          dash: line.dash,
          value,
          points: { show: false },
        })),
      ],
      axes: [
        { ...axis, space: 90, values: (_, splits) => splits.map(timeOfDay) },
        { ...axis, size: 88, values: (_, splits) => splits.map(this.format) },
      ],
      scales: { y: this.range ? { range: this.range } : { range: (_, low, high) => [Math.min(0, low), high > 0 ? 1.1 * high : 1] } },
      cursor: { drag: { x: false, y: false } },
    };
  }
}
