// The page: tabs, header and alarms around one live feed.

import * as api from "./api.js";
import { askForKeys, confirmOrder, tell } from "./dialogs.js";
import { h } from "./dom.js";
import { LiveFeed } from "./live.js";
import * as engines from "./tabs/engines.js";
import * as experts from "./tabs/experts.js";
import * as migrations from "./tabs/migrations.js";
import * as overview from "./tabs/overview.js";
import { installTheme } from "./theme.js";

const TABS = { overview, experts, migrations, engines };
const HEALTH_CLASS = { ready: "pill good", lost: "pill bad", draining: "pill" };

const byId = (id) => document.getElementById(id);
let view = null;
let newest = null;

/** What tabs may use besides their own element. */
const services = {
  get: api.get,
  confirmOrder,
  tell,
  /** Asks first, then calls with the admin key; says what went wrong. Resolves to the answer, or undefined. */
  async orderConfirmed({ title, text, action, method = "POST", path, body }) {
    if (!(await confirmOrder(title, text, action))) return undefined;
    try {
      return await api.order(method, path, body);
    } catch (error) {
      if (error.status === 401 || error.status === 403) {
        if (await askForKeys(`${error.message}.`)) feed.restart();
      } else await tell(`${action} failed`, error.message);
      return undefined;
    }
  },
};

const feed = new LiveFeed({
  onMessage(message, history) {
    newest = { message, history };
    byId("model").textContent = message.model;
    drawAlarms(message.alarms);
    view?.update(message, history);
  },
  onConnection(state, detail) {
    const health = state === "live" ? (newest?.message.health.state ?? "live") : state;
    const pill = byId("health");
    pill.className = HEALTH_CLASS[health] ?? "pill";
    pill.textContent = { lost: `no connection: ${detail}`, locked: "a key is needed" }[health] ?? health;
    document.body.dataset.connection = state;
    if (state === "locked" && !document.querySelector("dialog")) {
      askForKeys(`${detail}.`).then((isSaved) => isSaved && feed.restart());
    }
  },
});

function drawAlarms(alarms) {
  const rows = alarms.map((alarm) => h("div", { class: `alarm ${alarm.severity}` }, alarm.text));
  byId("alarms").replaceChildren(...rows);
}

function open(name) {
  const chosen = TABS[name] ? name : "overview";
  for (const tab of byId("tabs").children) {
    const isChosen = tab.dataset.tab === chosen;
    tab.setAttribute("aria-selected", isChosen);
    tab.tabIndex = isChosen ? 0 : -1;
  }
  view?.hide();
  const element = h("div", { role: "tabpanel", "aria-label": TABS[chosen].TITLE, id: "panel" });
  byId("view").replaceChildren(element);
  view = TABS[chosen].create(element, services);
  view.show();
  if (newest) view.update(newest.message, newest.history);
}

function buildTabs() {
  const names = Object.keys(TABS);
  const tabs = names.map((name) =>
    h("button", { role: "tab", type: "button", "data-tab": name, "aria-controls": "panel", onclick: () => (location.hash = name) }, TABS[name].TITLE),
  );
  byId("tabs").append(...tabs);
  byId("tabs").addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const next = tabs[(tabs.indexOf(document.activeElement) + step + tabs.length) % tabs.length];
    next.focus();
    next.click();
  });
  addEventListener("hashchange", () => open(location.hash.slice(1)));
}

buildTabs();
installTheme(byId("theme"), () => open(location.hash.slice(1)));
byId("key").addEventListener("click", async () => {
  if (await askForKeys()) feed.restart();
});
feed.run();
