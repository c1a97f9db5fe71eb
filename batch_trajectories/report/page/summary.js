// What charts and tiles show of some rows. A server sends the same for its rows.

const STEPS = 24;
const TIME_STEPS = 48;

const HISTOGRAMS = ["turns", "duration_s", "input_tokens", "output_tokens", "cost_usd", "reward"];
const AUDIT_HISTOGRAMS = ["setup_s", "check_s"];
const SUMS = ["turns", "calls", "failed_calls", "reasoned", "input_tokens", "cached_tokens", "output_tokens", "cost_usd", "reward"];

function tally(list, pick) {
  const found = new Map();
  for (const row of list) {
    for (const [name, n] of pick(row)) found.set(name, (found.get(name) ?? 0) + n);
  }
  return [...found].sort((a, b) => b[1] - a[1]);
}

function quantile(sorted, q) {
  return sorted[Math.min(sorted.length - 1, Math.floor(q * sorted.length))];
}

// How often values lie where, in equal steps, or in growing ones where they are far apart; in all, and
// of the rows that passed and did not.
function histogramOf(list, key, { whole = false } = {}) {
  const rows = list.filter((row) => row[key] != null);
  const known = rows.map((row) => row[key]).sort((a, b) => a - b);
  const counts = { known: known.length, missing: list.length - known.length };
  if (!known.length) return { ...counts, low: null, high: null };
  const low = known[0];
  const high = known[known.length - 1];
  const middle = { low, high, median: quantile(known, 0.5), p90: quantile(known, 0.9) };
  if (low === high) return { ...counts, ...middle, grows: false, edges: [], heights: [] };
  const positive = known.find((value) => value > 0) ?? 1;
  const grows = !whole && high / positive > 60;
  const steps = whole ? Math.max(1, Math.min(STEPS, high - low + 1)) : STEPS;
  const span = high - low + (whole ? 1 : 0);
  const place = (value) => {
    const part = grows ? Math.log(Math.max(value, positive) / positive) / Math.log(high / positive) : (value - low) / (span || 1);
    return Math.min(steps - 1, Math.floor(part * steps));
  };
  const edge = (n) => (grows ? positive * (high / positive) ** (n / steps) : low + (span * n) / steps);
  return { ...counts, ...middle, grows, edges: Array.from({ length: steps + 1 }, (_, n) => edge(n)), ...heightsOf(rows, steps, (row) => place(row[key])) };
}

function heightsOf(rows, steps, place) {
  const found = { heights: new Array(steps).fill(0), passed: new Array(steps).fill(0), failed: new Array(steps).fill(0) };
  for (const row of rows) {
    const step = place(row);
    found.heights[step] += 1;
    if (row.passed === true) found.passed[step] += 1;
    if (row.passed === false) found.failed[step] += 1;
  }
  return found;
}

function overTime(list) {
  const rows = list.filter((row) => row.finished_at != null);
  if (!rows.length) return null;
  const first = rows.reduce((at, row) => Math.min(at, row.finished_at), Infinity);
  const last = rows.reduce((at, row) => Math.max(at, row.finished_at), -Infinity);
  const place = (row) => Math.min(TIME_STEPS - 1, Math.floor(((row.finished_at - first) / (last - first || 1)) * TIME_STEPS));
  return { first, last, ...heightsOf(rows, TIME_STEPS, place) };
}

function summarize(list) {
  const number = (of) => list.reduce((n, row) => n + (of(row) ? 1 : 0), 0);
  const sum = (key) => list.reduce((total, row) => total + (row[key] ?? 0), 0);
  const calls = tally(list, (row) => Object.entries(row.tools).map(([name, [n]]) => [name, n]));
  const failed = new Map(tally(list, (row) => Object.entries(row.tools).map(([name, [, n]]) => [name, n])));
  const measured = meta.is_audit ? AUDIT_HISTOGRAMS : HISTOGRAMS;
  return {
    count: list.length,
    completed: number((row) => row.status === "completed"),
    passed: number((row) => row.passed === true),
    not_passed: number((row) => row.passed === false),
    unjudged: number((row) => row.reward == null),
    sums: Object.fromEntries(SUMS.map((key) => [key, sum(key)])),
    known: Object.fromEntries([...SUMS, "passed"].map((key) => [key, number((row) => row[key] != null)])),
    statuses: tally(list, (row) => [[row.status, 1]]),
    tools: calls.map(([name, n]) => [name, n, failed.get(name)]),
    failures: tally(list, (row) => Object.entries(row.failures ?? {})),
    flags: tally(list, (row) => row.flags.map((name) => [name, 1])),
    reasoning: {
      all: number((row) => row.turns && row.reasoned === row.turns),
      some: number((row) => row.turns && row.reasoned && row.reasoned < row.turns),
      none: number((row) => row.turns && !row.reasoned),
    },
    over_time: overTime(list),
    histograms: Object.fromEntries(measured.map((key) => [key, histogramOf(list, key, { whole: key === "turns" })])),
  };
}
