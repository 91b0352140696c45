// Overview: is it well, how much does it do, how even are its ranks?

import { TimeChart } from "../charts.js";
import { card, figure, greyedOut, h, meter } from "../dom.js";
import { fixed, number, percent, rate } from "../format.js";

export const TITLE = "Overview";

export function create(element) {
  const figures = h("div", { class: "grid" });
  const charts = buildCharts();
  const drawn = charts.map(({ title, chart }) => card(title, 4, chart.element));
  return {
    show() {
      element.append(figures, h("div", { class: "grid", style: { marginTop: "12px" } }, drawn));
    },
    update(message, history) {
      figures.replaceChildren(...drawFigures(message));
      for (const { chart } of charts) chart.draw(history);
    },
    hide() {
      for (const { chart } of charts) chart.recolor();
    },
  };
}

function drawFigures({ point, totals, placement }) {
  const balance =
    placement.balancedness === null
      ? greyedOut("Balancedness", `${placement.state}: ${placement.reason || "no load has been seen yet"}`, 2)
      : card("Balancedness", 2, figure(fixed(placement.balancedness), `chance allows ${fixed(placement.floor)}`));
  return [
    card("Output", 2, figure(rate(point.generation_tokens_per_s, "token"))),
    card("Prompts", 2, figure(rate(point.prompt_tokens_per_s, "token"))),
    card("Running", 2, figure(`${number(totals.running)} requests`)),
    card("Waiting", 2, figure(`${number(totals.waiting)} requests`, `${number(totals.unfinished)} in all`)),
    card("KV cache", 2, figure(percent(totals.kv_usage), "in use"), meter(totals.kv_usage, "KV cache in use")),
    balance,
  ];
}

function buildCharts() {
  return [
    {
      title: "Throughput",
      chart: new TimeChart({
        lines: [
          { label: "output", read: (point) => point.generation_tokens_per_s, color: "blue" },
          { label: "prompts", read: (point) => point.prompt_tokens_per_s, color: "orange", dash: [6, 4] },
        ],
        format: (value) => `${number(value)} tok/s`,
      }),
    },
    {
      title: "Requests",
      chart: new TimeChart({
        lines: [
          { label: "running", read: (point) => point.running, color: "blue" },
          { label: "waiting", read: (point) => point.waiting, color: "orange", dash: [6, 4] },
        ],
        format: number,
      }),
    },
    {
      title: "Balancedness of ranks",
      chart: new TimeChart({
        lines: [
          { label: "measured", read: (point) => point.balancedness, color: "blue" },
          { label: "chance allows", read: (point) => point.floor, color: "grey", dash: [6, 4] },
        ],
        format: (value) => fixed(value, 2),
        range: [0, 1],
      }),
    },
  ];
}
