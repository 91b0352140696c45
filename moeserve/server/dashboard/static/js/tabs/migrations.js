// Migrations: what the controller decided and why, what came of it, and the operator's own orders.

import { card, greyedOut, h, table } from "../dom.js";
import { bytes, clock, duration, fixed, number, percent } from "../format.js";
import { Poll } from "../poll.js";

export const TITLE = "Migrations";

const ASK_EVERY_MS = 2000;
const MAX_DECISIONS = 200;
const OUTCOME_CLASS = { kept: "good", done: "good", "no gain": "warn", "rolled back": "warn", aborted: "bad" };

export function create(element, services) {
  return new MigrationsView(element, services);
}

class MigrationsView {
  constructor(element, services) {
    this.element = element;
    this.services = services;
    this.plan = null;
    this.chosen = null;
    this.onlyActions = true;
    this.notice = h("div", {});
    this.state = h("div", { class: "grid" });
    this.proposal = h("div", {});
    this.timeline = h("div", {});
    this.list = h("div", {});
    this.details = h("div", {});
    this.poll = new Poll((signal) => this.ask(signal), ASK_EVERY_MS, (error) => this.showProblem(error.message));
  }

  show() {
    const gap = { style: { display: "grid", gap: "12px" } };
    this.element.append(h("div", gap, this.state, this.proposal, this.notice, this.timeline, this.details, this.list));
    this.poll.start();
  }

  update(message) {
    this.drawState(message.placement);
  }

  hide() {
    this.poll.stop();
  }

  async ask(signal) {
    this.decisions = (await this.services.get(`/v1/placement/decisions?limit=${MAX_DECISIONS}`, { signal })).decisions;
    this.notice.replaceChildren();
    this.draw();
  }

  showProblem(reason) {
    this.notice.replaceChildren(greyedOut("Migrations", `No decisions to show: ${reason}.`));
  }

  drawState(placement) {
    const change = placement.change;
    const isControlled = !["starting", "static", "stopped"].includes(placement.state);
    this.state.replaceChildren(
      card(
        "Controller",
        6,
        h(
          "div",
          { class: "row" },
          h("strong", {}, placement.frozen ? `${placement.state}, frozen` : placement.state),
          h("span", {}, placement.epoch === null ? "" : `epoch ${placement.epoch}`),
          h("span", { class: "quiet" }, placement.progress_age_s === null ? "" : `last progress ${duration(placement.progress_age_s)} ago`),
        ),
        h("p", { class: "quiet" }, placement.reason),
        this.drawButtons(placement, isControlled),
      ),
      change ? card("Under way", 6, drawChange(change)) : greyedOut("Under way", "nothing is being moved", 6),
    );
  }

  drawButtons({ frozen }, isControlled) {
    const button = (text, onclick) => h("button", { type: "button", disabled: !isControlled, onclick }, text);
    return h(
      "div",
      { class: "row" },
      button("Dry run", () => this.dryRun()),
      frozen
        ? button("Thaw", () => this.send("thaw", "Follow the load again?", "The controller starts migrations by itself from now on."))
        : button("Freeze", () => this.send("freeze", "Freeze placement?", "No migration starts by itself; copies under way are dropped. Serving goes on.")),
      button("Roll back", () => this.send("rollback", "Roll back?", "Experts move back to where they lay before the last migration.")),
    );
  }

  async dryRun() {
    const plan = await this.services.orderConfirmed({
      title: "Plan now?",
      text: "A plan is made from the newest load and shown. Nothing moves.",
      action: "Dry run",
      path: "/v1/placement/plan",
      body: {},
    });
    if (plan) this.plan = plan;
    this.drawProposal();
  }

  async send(what, title, text, body) {
    const done = await this.services.orderConfirmed({ title, text, action: title.replace("?", ""), path: `/v1/placement/${what}`, body });
    if (done !== undefined) this.poll.start();
    return done !== undefined;
  }

  drawProposal() {
    if (!this.plan) return this.proposal.replaceChildren();
    const { plan_id, moves, prediction, reason, worth } = this.plan;
    const close = () => {
      this.plan = null;
      this.drawProposal();
    };
    const apply = async () => {
      const text = `${number(moves.length)} expert copies move, ${bytes(prediction.num_bytes)} in about ${duration(prediction.copy_s)}. Requests go on meanwhile.`;
      if (await this.send("apply", "Apply this plan?", text, { plan_id })) close();
    };
    return this.proposal.replaceChildren(
      card(
        `Dry run ${plan_id}`,
        12,
        h("p", {}, `${worth ? "Worth it" : "Not worth it"}: ${reason}`),
        prediction ? drawPrediction(prediction) : null,
        h(
          "div",
          { class: "row" },
          h("button", { type: "button", class: "primary", disabled: !moves.length, onclick: apply }, "Apply"),
          h("button", { type: "button", onclick: close }, "Discard"),
        ),
        moves.length ? drawMoves(moves) : null,
      ),
    );
  }

  draw() {
    const isAction = (decision) => decision.action !== "none";
    const shown = this.onlyActions ? this.decisions.filter(isAction) : this.decisions;
    this.timeline.replaceChildren(drawTimeline(this.decisions.filter(isAction)));
    const choose = (event) => {
      this.onlyActions = event.target.checked;
      this.draw();
    };
    const filter = h("label", {}, h("input", { type: "checkbox", checked: this.onlyActions, onchange: choose }), "only decisions to act");
    const columns = [
      { title: "time", cell: (row) => clock(row.time_s) },
      { title: "epoch", number: true, cell: (row) => number(row.epoch) },
      { title: "action", cell: (row) => row.action },
      { title: "why", cell: (row) => row.reason },
      { title: "moves", number: true, cell: (row) => number(row.prediction?.num_moves) },
      { title: "bytes", number: true, cell: (row) => bytes(row.prediction?.num_bytes) },
      { title: "predicted gain", number: true, cell: (row) => percent(row.prediction?.gain_share, 2) },
      { title: "realised gain", number: true, cell: (row) => percent(row.outcome?.realised_share, 2) },
      { title: "outcome", cell: (row) => h("span", { class: OUTCOME_CLASS[row.outcome?.state] ?? "" }, row.outcome?.state ?? "–") },
    ];
    const empty = this.onlyActions && this.decisions.length ? "no decision to act among the newest; untick to see why not" : "no decision yet";
    const onChoose = (row) => {
      this.chosen = this.chosen === row.number ? null : row.number;
      this.draw();
    };
    const rows = table(columns, shown, { empty, onChoose, isChosen: (row) => row.number === this.chosen });
    this.list.replaceChildren(card("Decisions, newest first", 12, filter, rows));
    const chosen = this.decisions.find((row) => row.number === this.chosen);
    this.details.replaceChildren(...(chosen ? [drawDecision(chosen)] : []));
  }
}

function drawChange(change) {
  return h(
    "div",
    { class: "row" },
    h("strong", {}, `${change.kind}, ${change.stage}`),
    h("span", {}, `to epoch ${change.epoch}`),
    h("span", {}, `${number(change.num_moves)} moves, ${bytes(change.num_bytes)}`),
    h("span", {}, `for ${duration(change.age_s)}`),
    h("span", { class: "quiet" }, change.waiting_for_ranks.length ? `waiting for rank ${change.waiting_for_ranks.join(", ")}` : ""),
  );
}

function drawPrediction(prediction) {
  return h(
    "div",
    { class: "row" },
    h("span", {}, `${number(prediction.num_moves)} moves in ${number(prediction.num_layers)} layers`),
    h("span", {}, `${bytes(prediction.num_bytes)} in ${duration(prediction.copy_s)}`),
    h("span", {}, `gain ${percent(prediction.gain_share, 2)} of step time, ${duration(prediction.gain_s)} over the horizon`),
    h("span", {}, `cost ${duration(prediction.cost_s)}`),
  );
}

function drawMoves(moves) {
  const columns = [
    { title: "layer", number: true, cell: (row) => number(row.layer) },
    { title: "expert", number: true, cell: (row) => number(row.logical_expert_id) },
    { title: "from place", number: true, cell: (row) => number(row.source_physical_id) },
    { title: "to place", number: true, cell: (row) => number(row.destination_physical_id) },
    { title: "tokens off the fullest rank, per MiB", number: true, cell: (row) => number(row.gain_per_byte * 2 ** 20) },
  ];
  return h("details", {}, h("summary", {}, `${number(moves.length)} moves`), table(columns, moves.slice(0, 200)));
}

function drawDecision(decision) {
  const { load, prediction, outcome } = decision;
  return card(
    `Decision ${decision.number}: ${decision.action}`,
    12,
    h("p", {}, decision.reason),
    load
      ? h(
          "div",
          { class: "row" },
          h("span", {}, `saw ${number(load.num_tokens)} tokens in ${duration(load.duration_s)}`),
          h("span", {}, `balancedness ${fixed(load.balancedness_mean)}, worst ${fixed(load.balancedness_worst)} in layer ${load.worst_layer}`),
          h("span", {}, `best split ${fixed(load.resplit_mean)}`),
          h("span", {}, `chance allows ${fixed(load.floor)}, acts below ${fixed(load.trigger)}`),
        )
      : null,
    prediction ? drawPrediction(prediction) : null,
    outcome ? h("p", {}, `${outcome.state} at ${clock(outcome.time_s)}${outcome.reason ? `: ${outcome.reason}` : ""}`) : null,
  );
}

/** Acts as marks over time, with what came of them. */
function drawTimeline(actions) {
  if (actions.length === 0) return greyedOut("Time line", "nothing has been moved or split yet");
  const times = actions.map((row) => row.time_s);
  const [first, last] = [Math.min(...times), Math.max(...times, Math.min(...times) + 60)];
  const marks = actions.map((row) => {
    const color = { migrate: "var(--blue)", "roll back": "var(--orange)", split: "var(--grey)" }[row.action];
    const height = { migrate: 26, "roll back": 26, split: 12 }[row.action];
    const title = `${clock(row.time_s)} ${row.action}: ${row.reason}`;
    const left = `${(99 * (row.time_s - first)) / (last - first)}%`;
    return h("span", { title, style: { position: "absolute", bottom: 0, left, width: "4px", height: `${height}px`, background: color } });
  });
  const key = (text, color) => h("span", {}, h("span", { class: "key", style: { background: color } }), text);
  return card(
    "Time line",
    12,
    h("div", { style: { position: "relative", height: "30px", borderBottom: "1px solid var(--line)" } }, marks),
    h(
      "div",
      { class: "row quiet", style: { justifyContent: "space-between" } },
      h("span", {}, clock(first)),
      h("span", { class: "row" }, key("migration", "var(--blue)"), key("roll back", "var(--orange)"), key("new split", "var(--grey)")),
      h("span", {}, clock(last)),
    ),
  );
}
