// The source of the report: its data is inside the page or in script files beside it.

function embedded(id) {
  const element = $(id);
  const text = element.textContent;
  element.remove();
  return text;
}

meta = JSON.parse(embedded("meta-data"));

const rows = [];
const byId = new Map();
const CHUNKS_KEPT = 8;
const chunks = new Map(); // number → records; those inside the page are chunk 0
let inlineRecords = embedded("records-data");

function addRows(list) {
  for (const values of list) {
    const row = Object.fromEntries(meta.columns.map((name, n) => [name, values[n]]));
    rows.push(row);
    // An edited prompt under its old id leaves two records; links lead to the later one.
    byId.set(row.id, row);
  }
}

// Called by the script files beside the page. Those of another report have other numbers inside.
window.reportData = (report, kind, number, json) => {
  if (report !== meta.report_id) {
    trouble("The files beside this page belong to a later report. Reload it, or write it again.");
  } else if (kind === "rows") addRows(JSON.parse(json));
  else {
    chunks.set(number, JSON.parse(json));
    if (chunks.size > CHUNKS_KEPT) chunks.delete(chunks.keys().next().value);
  }
};

const addresses = {
  createScriptURL(address) {
    if (/^[^/:]+\/(rows|chunk-\d+)\.js$/.test(address)) return address;
    throw new TypeError(address);
  },
};
const files = window.trustedTypes
  ? window.trustedTypes.createPolicy("report-files", addresses)
  : addresses;

function load(name) {
  return new Promise((resolve, reject) => {
    const script = document.createElement("script");
    script.src = files.createScriptURL(`${encodeURIComponent(meta.files)}/${name}`);
    script.onload = () => (script.remove(), resolve());
    script.onerror = () =>
      reject(new Error(`Cannot read ${meta.files}/${name}, which belongs beside this page.`));
    document.head.append(script);
  });
}

async function recordOf(row) {
  if (meta.files === null) {
    if (inlineRecords !== null) chunks.set(0, JSON.parse(inlineRecords));
    inlineRecords = null;
  } else if (!chunks.has(row.chunk)) await load(`chunk-${row.chunk}.js`);
  const chunk = chunks.get(row.chunk);
  if (!chunk) throw new Error("This page and the files beside it do not belong together.");
  const { training_form: form, ...record } = chunk[row.place];
  return {
    form: form && { ...form, system: form.system == null ? null : meta.systems[form.system] },
    record: { ...record, tools: record.tools.map((n) => meta.tools[n]) },
  };
}

const FLAGS = {
  "failed calls": (row) => row.failed_calls > 0,
  "not completed": (row) => row.status !== "completed",
  "an error": (row) => row.error !== null,
  "turns without reasoning": (row) => row.reasoned < row.turns,
  "a suspected leak": (row) => row.leaks > 0,
  "tokens from a cache": (row) => row.cached_tokens > 0,
  "a cache miss": (row) => row.cache_misses > 0,
  "no tool call": (row) => row.calls === 0,
  "a training row": (row) => row.exported === "training",
  "a partial row": (row) => row.exported === "partial",
  "no row: rejected": (row) => row.exported === "rejects",
  "not checked or scored": (row) => row.reward == null && meta.is_checked,
};

function matches(row, filters, words) {
  if (filters.status && row.status !== filters.status) return false;
  if (filters.model && row.model !== filters.model) return false;
  if (filters.tool && !(meta.is_audit ? row.tools[filters.tool]?.[1] : Object.hasOwn(row.tools, filters.tool))) return false;
  if (filters.flag && !(FLAGS[filters.flag]?.(row) ?? row.flags.includes(filters.flag))) return false;
  if (!words.length) return true;
  row.text ??= [row.id, row.prompt, row.answer, row.reason, row.error, row.model].join("\n").toLowerCase();
  return words.every((word) => row.text.includes(word));
}

function compareBy(key, down) {
  const sign = down ? -1 : 1;
  return (a, b) => {
    const x = a[key];
    const y = b[key];
    if (x == null || y == null) return (x == null) - (y == null); // what is unknown comes last
    return sign * (typeof x === "string" ? x.localeCompare(y) : x - y);
  };
}

// The samples of a prompt together, by number; prompts in the order in which they first come.
function bySamples(list) {
  const groups = Map.groupBy(list, (row) => row.prompt_id);
  return [...groups.values()].flatMap((group) => group.sort((a, b) => a.sample - b.sample));
}

function groupRows() {
  for (const group of Map.groupBy(rows, (row) => row.prompt_id).values()) {
    const judged = group.filter((row) => row.passed != null);
    const sums = { samples: group.length, judged: judged.length, passed: judged.filter((row) => row.passed).length };
    if (group.length > 1) for (const row of group) row.group = sums;
  }
}

const PAGE = "report"; // in titles of the window
let found = []; // the rows that match, in order

const source = {
  total: 0,
  choices: null,

  async start() {
    const inline = JSON.parse(embedded("rows-data"));
    try {
      if (meta.files === null) addRows(inline);
      else await load("rows.js");
    } catch (error) {
      trouble(error.message);
    }
    const names = (pick) => tally(rows, (row) => pick(row).map((name) => [name, 1])).map(([name]) => name);
    this.total = rows.length;
    if (hasSamples()) groupRows();
    meta.is_checked = rows.some((row) => row.reward != null);
    meta.has_leaks = rows.some((row) => row.leaks);
    meta.has_caches = rows.some((row) => row.cached_tokens);
    this.statuses = tally(rows, (row) => [[row.status, 1]]);
    this.choices = {
      status: names((row) => [row.status]),
      tool: names((row) => Object.keys(row.tools)),
      flag: [...Object.keys(FLAGS).filter((flag) => !meta.is_audit && rows.some(FLAGS[flag])), ...names((row) => row.flags)],
      model: names((row) => [row.model]),
    };
    meta.has = COLUMNS_OF_DATA.filter((key) => rows.some((row) => isWorthAColumn(key, row[key])));
    startTable();
    describeRun();
    takeState(location.hash);
    await applyFilters();
  },

  // What `drawOverview` says: of the whole run, whatever the filters leave.
  numbers() {
    const number = (pick) => rows.reduce((n, row) => n + (pick(row) ? 1 : 0), 0);
    const last = rows.reduce((at, row) => Math.max(at, row.finished_at ?? 0), 0);
    const { statuses } = this;
    // Tasks of an audit have verdicts; attempts that failed are among their steps.
    const failed = meta.is_audit ? 0 : meta.funnel ? Object.entries(meta.funnel.steps.find((step) => step.name === "tasks").lost).reduce((n, [reason, lost]) => n + (reason.startsWith("failed: ") ? lost : 0), 0) : number((row) => row.status === "failed");
    const done = number((row) => row.status !== "failed");
    return {
      ended: done + failed, done, failed, tasks: meta.is_audit ? null : meta.tasks, isRunning: meta.is_running,
      passed: number((row) => row.passed), judged: number((row) => row.passed != null), completed: number((row) => row.status === "completed"),
      sound: number((row) => row.status === "sound"), trainingRows: meta.funnel?.exports[0]?.rows ?? null,
      costUsd: meta.spent.usd, costUnknown: meta.spent.unknown, leftS: null, tookS: last > meta.created ? last - meta.created : null, statuses,
    };
  },

  parse(hash) {
    const [id, turn] = hash.slice(1).split("?")[0].split("/").map(decoded);
    return { id, turn: Number(turn) || null };
  },
  async enter() {
    return true;
  },
  isOpen: () => true,
  link: (id, turn) => `#${id == null ? "" : `${encodeURIComponent(id)}${turn ? `/${turn}` : ""}`}${stateText()}`,
  has: (id) => byId.has(id),
  readWords: () => "",

  async find(filters, order) {
    const words = filters.query.toLowerCase().split(/\s+/).filter(Boolean);
    found = rows.filter((row) => matches(row, filters, words));
    if (order.key) found.sort(compareBy(order.key, order.down));
    else if (hasSamples()) found = bySamples(found);
    return { matching: found.length, summary: async () => summarize(found) };
  },
  rowAt: (place) => found[place],
  async load() {},

  async read(id) {
    const row = byId.get(id);
    if (!row) throw new Missing(`There is no conversation ${visible(id)} in this report.`);
    const { record, form } = await recordOf(row);
    const place = found.indexOf(row);
    const around = {
      before: found[place - 1]?.id, after: place < 0 ? undefined : found[place + 1]?.id,
      place: place < 0 ? null : place, matching: found.length,
    };
    return { row, record, form, around };
  },
};
