// Engines and ranks: how the engine is laid out, and what each replica and rank does.

import { card, greyedOut, h, stack, table } from "../dom.js";
import { duration, number, percent } from "../format.js";

export const TITLE = "Engines and ranks";

export function create(element, services) {
  const body = h("div", { class: "grid" });
  return {
    show() {
      element.append(body);
    },
    update(message) {
      body.replaceChildren(drawLayout(message, services), drawReplicas(message), drawRanks(message.placement));
    },
    hide() {},
  };
}

function drawLayout({ health, layout, uptime_s, version }, services) {
  const isDraining = health.state === "draining";
  const order = isDraining
    ? { title: "Take requests again?", text: "New requests are let in from now on.", action: "Undrain", path: "/v1/undrain" }
    : {
        title: "Drain this server?",
        text: "New requests are refused with 503 from now on, and /health says so; those that are here run to their end.",
        action: "Drain",
        path: "/v1/drain",
      };
  return card(
    "Layout",
    12,
    h(
      "div",
      { class: "row" },
      h("span", {}, `${layout.dp_size} replicas × ${layout.tp_size} tensor-parallel ranks = ${layout.num_ranks} ranks; experts over all of them`),
      h("span", { class: "quiet" }, `moeserve ${version}, up ${duration(uptime_s)}`),
      h("button", { type: "button", id: "drain", onclick: () => services.orderConfirmed(order) }, order.action),
    ),
  );
}

function drawReplicas({ replicas }) {
  const columns = [
    { title: "replica", cell: (row) => `dp ${row.dp_rank}` },
    { title: "state", cell: (row) => h("span", { class: row.is_ready ? "good" : "bad" }, row.is_ready ? "✓ ready" : "✗ not there") },
    { title: "last step", number: true, cell: (row) => (row.report_age_s === null ? "–" : `${duration(row.report_age_s)} ago`) },
    { title: "steps", number: true, cell: (row) => number(row.num_steps) },
    { title: "running", number: true, cell: (row) => number(row.running) },
    { title: "waiting", number: true, cell: (row) => number(row.waiting) },
    { title: "prefix hits", number: true, cell: (row) => percent(row.prefix_hit_rate) },
    { title: "preemptions", number: true, cell: (row) => number(row.num_preemptions) },
    { title: "KV blocks", cell: drawBlocks },
  ];
  return card("Replicas", 12, table(columns, replicas));
}

function drawBlocks(row) {
  if (row.num_blocks === null) return "–";
  const parts = [
    { name: "held", value: row.num_blocks - row.free_blocks, color: "var(--blue)" },
    { name: "free", value: row.free_blocks, color: "var(--grey)" },
  ];
  return h("div", { style: { minWidth: "220px" } }, stack(parts, number));
}

function drawRanks(placement) {
  if (!placement.rank_load.length) return greyedOut("Load of ranks", `${placement.state}: ${placement.reason || "no load has been seen yet"}`);
  const most = Math.max(...placement.rank_load, 1);
  const bars = placement.rank_load.map((load, rank) =>
    h(
      "div",
      { style: { display: "grid", gridTemplateColumns: "60px 1fr 60px", gap: "8px", alignItems: "center" } },
      h("span", { class: "quiet" }, `rank ${rank}`),
      h("div", { class: "meter" }, h("span", { style: { width: `${(100 * load) / most}%` } })),
      h("span", {}, `${load.toFixed(2)} ×`),
    ),
  );
  const note = h("p", { class: "quiet" }, "Expert tokens of a rank over the mean rank's, averaged over the layers.");
  const columns = placement.rank_load.length > 8 ? "repeat(auto-fill, minmax(260px, 1fr))" : "1fr";
  return card("Load of ranks", 12, note, h("div", { style: { display: "grid", gap: "4px 20px", gridTemplateColumns: columns } }, bars));
}
