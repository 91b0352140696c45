// Asking again while a view is open.

/** Calls `ask(signal)` now and every `everyMs` after its answer, until `stop`. Errors go to `onError`. */
export class Poll {
  constructor(ask, everyMs, onError) {
    this.ask = ask;
    this.everyMs = everyMs;
    this.onError = onError;
    this.abort = null;
    this.timer = null;
  }

  /** From now on; asks at once, also where it was at work already. */
  start() {
    this.stop();
    const abort = (this.abort = new AbortController());
    const again = async () => {
      try {
        await this.ask(abort.signal);
      } catch (error) {
        if (abort.signal.aborted) return;
        this.onError(error);
      }
      if (!abort.signal.aborted) this.timer = setTimeout(again, this.everyMs);
    };
    again();
  }

  stop() {
    this.abort?.abort();
    clearTimeout(this.timer);
  }
}
