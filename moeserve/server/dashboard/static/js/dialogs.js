// Questions to the operator: the keys, and "are you sure".

import { readKeys, saveKeys } from "./api.js";
import { h } from "./dom.js";

/** Asks for the keys; resolves to whether they were saved. */
export function askForKeys(reason = "") {
  const keys = readKeys();
  const field = (name, value) => h("input", { type: "password", name, value, autocomplete: "off" });
  const api = field("api", keys.api);
  const admin = field("admin", keys.admin);
  return ask(
    "Keys",
    [
      h("p", {}, reason || "Kept in this tab until it is closed."),
      h("label", {}, "API key, to look", api),
      h("label", {}, "Admin key, to change something", admin),
    ],
    "Save",
  ).then((isSaved) => {
    if (isSaved) saveKeys({ api: api.value.trim(), admin: admin.value.trim() });
    return isSaved;
  });
}

/** Says what is about to be done, and resolves to whether it shall be. */
export function confirmOrder(title, text, action) {
  return ask(title, [h("p", {}, text)], action);
}

/** Says what went wrong. */
export function tell(title, text) {
  return ask(title, [h("p", {}, text)], "Close", { canCancel: false });
}

function ask(title, content, action, { canCancel = true } = {}) {
  return new Promise((resolve) => {
    const dialog = h("dialog", { "aria-label": title });
    const cancel = h("button", { type: "button", onclick: () => dialog.close("") }, "Cancel");
    dialog.append(
      h(
        "form",
        { method: "dialog" },
        h("h2", {}, title),
        content,
        h("div", { class: "row" }, canCancel ? cancel : null, h("button", { class: "primary", value: "yes" }, action)),
      ),
    );
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(dialog.returnValue === "yes");
    });
    document.body.append(dialog);
    dialog.showModal();
  });
}
