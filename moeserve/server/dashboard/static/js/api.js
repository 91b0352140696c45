// Calls to the server, with the keys this tab of the browser was given.

const API_KEY = "moeserve.api-key";
const ADMIN_KEY = "moeserve.admin-key";

/** An answer that is not 2xx, or no answer at all (status 0). */
export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export function readKeys() {
  return { api: sessionStorage.getItem(API_KEY) ?? "", admin: sessionStorage.getItem(ADMIN_KEY) ?? "" };
}

/** Kept until the browser's tab is closed. */
export function saveKeys({ api, admin }) {
  sessionStorage.setItem(API_KEY, api);
  sessionStorage.setItem(ADMIN_KEY, admin);
}

/** JSON of a GET. Raises ApiError. */
export async function get(path, { signal } = {}) {
  const { api, admin } = readKeys();
  return (await call(path, { signal, headers: bearer(api || admin) })).json();
}

/** A call that changes something: made with the admin key. Raises ApiError. */
export async function order(method, path, body) {
  const { api, admin } = readKeys();
  const headers = { ...bearer(admin || api), "content-type": "application/json" };
  const response = await call(path, { method, headers, body: body === undefined ? undefined : JSON.stringify(body) });
  const text = await response.text();
  return text ? JSON.parse(text) : null;
}

/** The messages of an event stream, parsed, until it ends; raises ApiError. */
export async function* events(path, signal) {
  const { api, admin } = readKeys();
  const response = await call(path, { signal, headers: { ...bearer(api || admin), accept: "text/event-stream" } });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const data = block.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6));
      if (data.length) yield JSON.parse(data.join("\n"));
    }
  }
}

function bearer(key) {
  return key ? { authorization: `Bearer ${key}` } : {};
}

async function call(path, options) {
  let response;
  try {
    response = await fetch(path, { cache: "no-store", ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "the server does not answer");
  }
  if (response.ok) return response;
  const text = await response.text();
  throw new ApiError(response.status, describe(text) || `the server answered ${response.status}`);
}

function describe(text) {
  try {
    return JSON.parse(text).error.message;
  } catch {
    return text.slice(0, 300);
  }
}
