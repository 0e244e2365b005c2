// Numbers and times as people read them; what is not known is a dash.

export const NONE = "–";

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const tenths = new Intl.NumberFormat("en", { minimumFractionDigits: 1, maximumFractionDigits: 1 });
const short = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
const time = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });
const day = new Intl.DateTimeFormat(undefined, {
  year: "numeric", month: "short", day: "numeric", hour: "2-digit", minute: "2-digit", hourCycle: "h23",
});

const known = (format) => (value) => (value == null || Number.isNaN(value) ? NONE : format(value));

export const count = known((n) => whole.format(n));
export const compact = known((n) => short.format(n));
export const rate = known((n) => (n >= 100 || n === 0 ? whole : tenths).format(n));
export const figure = known((x) => x.toFixed(4));
export const value = known((x) => (Math.abs(x) >= 1e4 || (x !== 0 && Math.abs(x) < 1e-4) ? x.toExponential(2) : x.toFixed(4)));

export const bytes = known((n) => {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const unit = Math.min(units.length - 1, n < 1024 ? 0 : Math.floor(Math.log2(n) / 10));
  return `${(unit ? tenths : whole).format(n / 1024 ** unit)} ${units[unit]}`;
});

/** A span of time, given in seconds. */
export const span = known((s) => {
  if (s < 1) return `${whole.format(Math.max(0, s) * 1000)} ms`;
  if (s < 60) return `${tenths.format(s)} s`;
  if (s < 3600) return `${whole.format(s / 60)} min`;
  return s < 86400 ? `${tenths.format(s / 3600)} h` : `${tenths.format(s / 86400)} d`;
});

/** A moment, in seconds since the epoch; the day is left out where it is today. */
export const moment = known((s) => {
  const at = new Date(s * 1000);
  return (at.toDateString() === new Date().toDateString() ? time : day).format(at);
});

export const sum = (values) => Object.values(values ?? {}).reduce((total, one) => total + (one ?? 0), 0);

/** Some figure of each label; the label is named where there are several. */
export function byLabel(metrics, name) {
  const labels = Object.keys(metrics ?? {});
  const known = labels.filter((label) => metrics[label][name] != null);
  return known.map((label) => (labels.length > 1 ? `${label}\u00a0` : "") + figure(metrics[label][name])).join(" · ") || NONE;
}
