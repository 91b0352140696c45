// Experts: who is hot, on which layer and rank, where the copies lie.

import { card, greyedOut, h, table } from "../dom.js";
import { fixed, number, percent } from "../format.js";
import { cividisGradient, HeatMap } from "../heatmap.js";
import { Poll } from "../poll.js";

export const TITLE = "Experts";

const ASK_EVERY_MS = 2000;
const MEASURES = {
  relative: { title: "load, × the mean", text: (value) => `${fixed(value, 2)} ×` },
  share: { title: "share of the layer's tokens", text: (value) => percent(value, 2) },
  load: { title: "tokens", text: number },
  replicas: { title: "replicas", text: number },
};

export function create(element, services) {
  return new ExpertsView(element, services);
}

class ExpertsView {
  constructor(element, services) {
    this.element = element;
    this.services = services;
    this.choice = { phase: "mixed", window: "60", axis: "experts", measure: "relative" };
    this.chosen = 0;
    this.load = null;
    this.map = null;
    this.pins = [];
    this.heat = new HeatMap({
      label: "Load by layer and expert or rank; arrow keys read cells, Enter opens a layer",
      describe: (row, column) => this.describe(row, column),
      onChoose: (row) => {
        this.chosen = row;
        this.draw();
      },
    });
    this.controls = h("div", { class: "row" });
    this.legend = h("div", { class: "row quiet" });
    this.facts = h("div", { class: "row quiet" });
    this.heatCard = card("Load", 12, this.controls, this.facts, this.heat.element, this.legend);
    this.details = h("div", { class: "grid", style: { marginTop: "12px" } });
    this.notice = h("div", {});
    this.poll = new Poll((signal) => this.ask(signal), ASK_EVERY_MS, (error) => this.showProblem(error.message));
  }

  show() {
    this.drawControls();
    this.element.append(this.notice, h("div", { class: "grid" }, this.heatCard), this.details);
    this.heatCard.hidden = true;
    this.poll.start();
  }

  update() {}

  hide() {
    this.poll.stop();
    this.heat.remove();
  }

  async ask(signal) {
    const { phase, window } = this.choice;
    const load = await this.services.get(`/v1/placement/load?phase=${phase}&window=${window}`, { signal });
    if (this.map?.epoch !== load.epoch || this.split !== load.num_windows) {
      const placement = await this.services.get("/v1/placement", { signal });
      this.map = placement.map;
      this.pins = placement.pins;
      this.split = load.num_windows;
    }
    this.load = load;
    this.notice.replaceChildren();
    this.heatCard.hidden = false;
    this.draw();
  }

  showProblem(reason) {
    this.notice.replaceChildren(greyedOut("Experts", `No map to show: ${reason}.`));
    this.heatCard.hidden = this.load === null;
  }

  drawControls() {
    const select = (name, title, options) => {
      const list = Object.entries(options).map(([value, text]) => h("option", { value, selected: this.choice[name] === value }, text));
      const choose = (event) => {
        this.choice[name] = event.target.value;
        if (name === "phase" || name === "window") this.poll.start();
        else this.draw();
      };
      return h("label", {}, title, h("select", { name, onchange: choose }, list));
    };
    const measures = Object.fromEntries(Object.entries(MEASURES).map(([name, measure]) => [name, measure.title]));
    this.controls.replaceChildren(
      select("axis", "of", { experts: "logical experts", ranks: "ranks" }),
      select("measure", "show", measures),
      select("phase", "phase", { mixed: "prefill and decode", prefill: "prefill", decode: "decode" }),
      select("window", "newest", { 5: "5 s", 60: "60 s", 300: "5 min" }),
    );
  }

  /** Rows of the chosen measure, by layer. */
  values() {
    const { axis, measure } = this.choice;
    return this.load.layers.map((layer, row) => {
      if (measure === "replicas") return axis === "experts" ? this.map.layers[row].num_replicas : placesByRank(this.map);
      const loads = axis === "experts" ? layer.expert_load : layer.rank_load;
      if (measure === "load") return loads;
      const total = loads.reduce((sum, value) => sum + value, 0) || 1;
      return loads.map((value) => (measure === "share" ? value / total : (value * loads.length) / total));
    });
  }

  draw() {
    if (!this.load || !this.map) return;
    const rows = this.values();
    const most = rows.reduce((highest, row) => row.reduce((high, value) => Math.max(high, value), highest), 0);
    const { title, text } = MEASURES[this.choice.measure];
    this.shown = rows;
    this.heat.draw({
      rows,
      names: this.load.layers.map((layer) => `L ${layer.layer}`),
      columnName: this.choice.axis === "experts" ? "expert" : "rank",
      most,
      chosen: this.chosen,
    });
    const { balancedness_mean, balancedness_worst, worst_layer, floor, num_tokens, duration_s } = this.load;
    this.facts.replaceChildren(
      h("span", {}, `epoch ${this.load.epoch}`),
      h("span", {}, `${number(num_tokens)} tokens in ${number(duration_s)} s`),
      h("span", {}, `balancedness ${fixed(balancedness_mean)}, worst ${fixed(balancedness_worst)} in layer ${worst_layer}`),
      h("span", {}, `chance allows ${fixed(floor)}`),
    );
    this.legend.replaceChildren(h("span", {}, `${title}:`), text(0), h("span", { class: "scale", style: { background: cividisGradient() } }), text(most));
    this.drawLayer();
  }

  describe(row, column) {
    const { axis, measure } = this.choice;
    const layer = this.load.layers[row];
    const head = `layer ${layer.layer}, ${axis === "experts" ? "expert" : "rank"} ${column}`;
    const loads = axis === "experts" ? layer.expert_load : layer.rank_load;
    const lines = [head, `${MEASURES[measure].title}: ${MEASURES[measure].text(this.shown[row][column])}`, `${number(loads[column])} tokens`];
    if (axis === "experts") lines.push(...copies(this.map, row, column).map((copy) => `rank ${copy.rank} (${copy.node}): ${percent(copy.share, 0)}`));
    return lines.join("\n");
  }

  drawLayer() {
    const row = Math.min(this.chosen, this.load.layers.length - 1);
    const layer = this.load.layers[row];
    this.details.replaceChildren(
      card(`Layer ${layer.layer}: ranks`, 6, ...this.drawRanks(row)),
      card(`Layer ${layer.layer}: experts, hottest first`, 6, this.drawExperts(row)),
    );
  }

  drawRanks(row) {
    const { rank_load } = this.load.layers[row];
    const most = Math.max(...rank_load, 1);
    const mean = rank_load.reduce((sum, value) => sum + value, 0) / rank_load.length || 1;
    const parts = partsByRank(this.map, row, this.load.layers[row].expert_load);
    return this.map.ranks.map(({ rank, node, num_places }) => {
      const bars = parts[rank].map(({ expert, tokens, numReplicas }) =>
        h("span", {
          title: `expert ${expert}: ${number(tokens)} tokens here, ${numReplicas} replica${numReplicas > 1 ? "s" : ""}`,
          style: {
            width: `${(100 * tokens) / most}%`,
            background: numReplicas > 1 ? "var(--orange)" : "var(--blue)",
            borderRight: "1px solid var(--card)",
          },
        }),
      );
      return h(
        "div",
        { style: { marginBottom: "6px" } },
        h("div", {}, `rank ${rank} `, h("span", { class: "quiet" }, `${nodeName(node)}, ${num_places} places, ${fixed(rank_load[rank] / mean, 2)} × the mean`)),
        h("div", { class: "stack" }, bars),
      );
    }).concat(
      h(
        "div",
        { class: "row quiet" },
        h("span", {}, h("span", { class: "key", style: { background: "var(--blue)" } }), "an expert with one copy"),
        h("span", {}, h("span", { class: "key", style: { background: "var(--orange)" } }), "a replicated expert's part"),
      ),
    );
  }

  drawExperts(row) {
    const { layer, expert_load } = this.load.layers[row];
    const total = expert_load.reduce((sum, value) => sum + value, 0) || 1;
    const order = expert_load.map((_, expert) => expert).sort((a, b) => expert_load[b] - expert_load[a]).slice(0, 16);
    const pinned = (expert) => this.pins.filter((pin) => pin.logical_expert_id === expert && (pin.layer === null || pin.layer === layer));
    const columns = [
      { title: "expert", number: true, cell: (expert) => number(expert) },
      { title: "share", number: true, cell: (expert) => percent(expert_load[expert] / total, 2) },
      {
        title: "copies: rank (node), part of its tokens",
        cell: (expert) => copies(this.map, row, expert).map((copy) => `${copy.rank} (${copy.node}) ${percent(copy.share, 0)}`).join(" · "),
      },
      { title: "pinned to", cell: (expert) => pinned(expert).map((pin) => `rank ${pin.rank}`).join(", ") || "–" },
    ];
    return table(columns, order);
  }
}

function rankOf(map, place) {
  return map.ranks.find(({ first_place, num_places }) => place >= first_place && place < first_place + num_places);
}

function nodeName(node) {
  return typeof node === "number" ? `node ${node}` : node;
}

/** Where the copies of an expert lie, and which part of its tokens each gets. */
function copies(map, row, expert) {
  const { physical_to_logical, split } = map.layers[row];
  return physical_to_logical.flatMap((logical, place) => {
    if (logical !== expert) return [];
    const { rank, node } = rankOf(map, place);
    return [{ rank, node: nodeName(node), share: split[place] }];
  });
}

function placesByRank(map) {
  return map.ranks.map(({ num_places }) => num_places);
}

/** The experts of each rank with the tokens they get there, most first. */
function partsByRank(map, row, expertLoad) {
  const { physical_to_logical, split, num_replicas } = map.layers[row];
  return map.ranks.map(({ first_place, num_places }) =>
    physical_to_logical
      .slice(first_place, first_place + num_places)
      .map((expert, index) => ({ expert, tokens: expertLoad[expert] * split[first_place + index], numReplicas: num_replicas[expert] }))
      .sort((a, b) => b.tokens - a.tokens),
  );
}
