// The stream of server-sent events: one small message a second, and a connection that comes back by itself.

import { ApiError, events } from "./api.js";

const PATH = "/v1/events";
const SILENCE_MS = 5000;
const LONGEST_WAIT_MS = 8000;
const HISTORY_POINTS = 600;

/**
 * `onMessage(message, history)` gets each message with the points of the last ten minutes; `onConnection(state, detail)`
 * gets "live", "lost" or "locked" (a key is needed).
 */
export class LiveFeed {
  constructor({ onMessage, onConnection }) {
    this.onMessage = onMessage;
    this.onConnection = onConnection;
    this.history = [];
    this.abort = null;
  }

  /** Never returns. */
  async run() {
    let waitMs = 500;
    for (;;) {
      try {
        await this.listen(() => (waitMs = 500));
        this.onConnection("lost", "the server closed the connection");
      } catch (error) {
        const isLocked = error instanceof ApiError && (error.status === 401 || error.status === 403);
        this.onConnection(isLocked ? "locked" : "lost", error.name === "AbortError" ? "nothing heard for 5 s" : error.message);
      }
      await this.pause(waitMs);
      waitMs = Math.min(2 * waitMs, LONGEST_WAIT_MS);
    }
  }

  /** Connect now, for instance with another key. */
  restart() {
    this.abort?.abort();
    this.wake?.();
  }

  async listen(onSuccess) {
    this.abort = new AbortController();
    let timer = null;
    const watch = () => {
      clearTimeout(timer);
      timer = setTimeout(() => this.abort.abort(), SILENCE_MS);
    };
    watch();
    try {
      for await (const message of events(PATH, this.abort.signal)) {
        watch();
        onSuccess();
        this.take(message);
      }
    } finally {
      clearTimeout(timer);
    }
  }

  take(message) {
    if (message.history) this.history = message.history;
    else this.history.push(message.point);
    if (this.history.length > HISTORY_POINTS) this.history.splice(0, this.history.length - HISTORY_POINTS);
    this.onConnection("live", "");
    this.onMessage(message, this.history);
  }

  pause(waitMs) {
    return new Promise((resolve) => {
      this.wake = resolve;
      setTimeout(resolve, waitMs);
    });
  }
}
