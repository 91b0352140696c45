// Numbers as text, always with their unit.

const MISSING = "–";

function isMissing(value) {
  return value === null || value === undefined || Number.isNaN(value);
}

/** Three significant digits, or a whole number with separators. */
export function number(value) {
  if (isMissing(value)) return MISSING;
  if (Number.isInteger(value) || Math.abs(value) >= 1000) return Math.round(value).toLocaleString("en");
  return Number(value.toPrecision(3)).toString();
}

export function percent(share, digits = 1) {
  return isMissing(share) ? MISSING : `${(100 * share).toFixed(digits)} %`;
}

export function bytes(count) {
  if (isMissing(count)) return MISSING;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const power = Math.min(units.length - 1, count > 0 ? Math.max(0, Math.floor(Math.log2(count) / 10)) : 0);
  return `${number(count / 1024 ** power)} ${units[power]}`;
}

/** Of a latency or a span of time given in seconds. */
export function duration(seconds) {
  if (isMissing(seconds)) return MISSING;
  if (seconds < 0.9995e-3) return `${number(seconds * 1e6)} µs`;
  if (seconds < 0.9995) return `${number(seconds * 1e3)} ms`;
  if (seconds < 120) return `${number(seconds)} s`;
  if (seconds < 7200) return `${number(seconds / 60)} min`;
  return `${number(seconds / 3600)} h`;
}

export function rate(value, what) {
  return isMissing(value) ? MISSING : `${number(value)} ${what}/s`;
}

/** Local time of day of a Unix time. */
export function clock(unixSeconds) {
  return isMissing(unixSeconds) ? MISSING : new Date(1000 * unixSeconds).toLocaleTimeString("en-GB");
}

export function fixed(value, digits = 3) {
  return isMissing(value) ? MISSING : value.toFixed(digits);
}
