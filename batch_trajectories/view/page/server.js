// The source of the view: runs, rows and conversations of a server, and its events.

const PAGE = "runs"; // in titles of the window
const PAGE_ROWS = 200;
const PAGES_KEPT = 50;
const REFRESH_MS = 2000;
const READ_AGAIN_MS = 500;
const MOST_CHOSEN_AGAIN = 50_000;

const runs = new Map(); // key → run
let about = null; // what is known of the run that is shown: the answer of /api/runs/KEY
let pages = new Map(); // number → rows, the latest last
const coming = new Map(); // number → promise
let query = new URLSearchParams(); // filters and order of the rows
let events = null;
let heard = ""; // the address of `events`

Object.assign(filters, { label: "", inside: false, where: "" });

const SILENT = "The server does not answer. See whether `view` still runs, then reload this page.";
const SILENT_MS = 3000; // a stream that ends is opened again at once

async function ask(path, body) {
  const post = { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) };
  let answer;
  try {
    answer = await fetch(path, body === undefined ? {} : post);
  } catch {
    throw new Error(SILENT);
  }
  const said = await answer.json().catch(() => ({ error: `The server answered with ${answer.status}.` }));
  if (answer.status === 401) {
    if (said.login) showLogin();
    else showNoToken();
  }
  if (!answer.ok) throw Object.assign(new (answer.status === 404 ? Missing : Error)(said.error), { said, isShown: answer.status === 401 });
  return said;
}

// What to do without the token of the printed address.
function showNoToken() {
  if ($("no-token")) return;
  showPlace("login");
  $("login").append(h("section", { id: "no-token" },
    h("h2", {}, "This address lacks its token"),
    h("p", {}, "The runs are shown only to who started the server. In its terminal it printed an address such as"),
    h("pre", {}, `${location.origin}/?token=…`),
    h("p", {}, "Open that one, with what stands after the question mark; this browser then remembers it. Each start of ", h("code", {}, "view"), " prints a new token: an older address or bookmark does not work any more."),
    h("p", {}, "The terminal is gone? Stop the server and start it again.")));
}

// The form for the password of a server that others can reach.
function showLogin() {
  if ($("password")) return;
  const password = h("input", { type: "password", id: "password", autocomplete: "current-password", required: true });
  const signIn = async (event) => {
    event.preventDefault();
    try {
      await ask("/api/login", { password: password.value });
      location.reload();
    } catch (error) {
      trouble(error.message);
    }
  };
  showPlace("login");
  $("login").append(h("form", { submit: signIn, class: "bar" },
    h("input", { type: "text", hidden: true, autocomplete: "username", value: "reviewer" }), h("label", {}, "Password ", password), h("button", {}, "Sign in")));
  password.focus();
}

const runPath = (rest = "") => `/api/runs/${encodeURIComponent(about.run.key)}${rest}`;
const keyLink = (key) => `#${encodeURIComponent(key)}`;

// Until the rows of a run come, what is read is said, and nothing of another run is left.
function showReading(key) {
  const run = runs.get(key);
  meta = null;
  listen(null, null); // what another run says is not asked for
  showCrumb(key);
  $("state-mark").replaceChildren();
  if (run) fill($("state-mark"), {}, [stateMark(run)]);
  $("state-line").replaceChildren();
  answered("");
  $("run-state").hidden = !isAtWork(run ?? {});
  $("sentence").textContent = `Reading ${visible(key)} …`;
  for (const id of ["numbers", "rows", "heads", "tiles", "charts"]) $(id).replaceChildren();
  // As many lines as the problems that the list knows will have, so that the table stays in its place.
  const lines = Math.min(PROBLEMS_SHOWN, (run?.health?.length ?? 0) + (run?.failed ? 1 : 0) + (run?.checked >= 10 && !run.passed ? 1 : 0) + (run?.training_rows === 0 ? 1 : 0));
  $("problems").replaceChildren(...Array.from({ length: Math.max(1, lines) }, () => h("li", { class: "soft" }, "\u00a0")));
  $("problems").classList.remove("bad");
  $("found").textContent = "";
  $("about").textContent = "";
}

// The name of the run behind "Runs".
function showCrumb(key) {
  $("crumb")?.remove();
  $("home").after(h("a", { id: "crumb", href: keyLink(key) }, runs.get(key)?.name ?? key));
}

function leaveRun() {
  $("about").textContent = "";
  $("state-mark").replaceChildren();
  $("crumb")?.remove();
  meta = null;
}

// A heading of the window, and which of the places is shown.
function showPlace(name) {
  for (const id of ["login", "runs", "compare", "list", "reader"]) $(id).hidden = id !== name;
}

function metaOf({ run, identity, facts, choices: known }) {
  const flags = new Set((known.flag ?? []).map(([name]) => name));
  return {
    ...identity, run_name: run.name, is_audit: false, is_steps: run.is_audit, is_counting: facts === null,
    is_checked: run.is_audit || ["passed", "not passed", "check without result"].some((name) => flags.has(name)) || run.checked > 0,
    has: known.has ?? [], samples: identity.samples,
    has_leaks: flags.has("a suspected leak"), has_caches: flags.has("tokens from a cache"), has_labels: (known.label ?? []).some(([name]) => name !== "none"),
    tasks: facts?.tasks ?? run.tasks, funnel: facts?.funnel ?? null, signs: facts?.signs ?? [], errors: facts?.errors ?? [],
    health: facts?.health ?? run.health ?? [], caches: facts?.caches, rewards: facts?.rewards, spent: facts?.spent, judges: facts?.judges,
  };
}

const VERDICT_WORDS = { keep: "✓ keep", reject: "✗ reject", fix: "✎ fix-me", disputed: "≠ disputed" };
const VERDICT_KINDS = { keep: "good", reject: "bad", fix: "fair", disputed: "fair" };

const verdictMark = (verdict) => verdict && h("span", { class: `verdict ${VERDICT_KINDS[verdict]}` }, VERDICT_WORDS[verdict]);

const LABEL_COLUMN = { key: "verdict", name: "Decided", rem: 6.5, isFixed: true, isThere: () => meta.has_labels, cell: (row) => verdictMark(row.verdict) };
COLUMNS.splice(2, 0, LABEL_COLUMN);

const LABEL_CHOICES = ["none", "keep", "reject", "fix", "disputed", "note", "no_loss", "preferred"];

async function openRun(key) {
  const isNew = about?.run.key !== key;
  about = await ask(`/api/runs/${encodeURIComponent(key)}`);
  runs.set(key, about.run);
  meta = metaOf(about);
  takeChoices();
  if (isNew) {
    Object.assign(filters, noFilters());
    Object.assign(order, { key: null, down: false });
    chosenColumns = null;
    forgetOverview();
    pages = new Map();
    matching = 0;
  }
  choices("by-label", LABEL_CHOICES);
  showCrumb(key);
  nameRows();
  startTable();
  describeRun();
  showRunState();
  showAgreement();
  if (isNew) {
    if (!takeState(location.hash)) showTab(TABS[0]);
    await applyFilters();
  } else await applyFilters({ stays: true });
}

// What the rows of the run are.
function nameRows() {
  $("tab-conversations").textContent = meta.is_steps ? "Steps" : "Conversations";
  $("query").placeholder = meta.is_steps ? "id, prompt, step, result" : "id, prompt, answer, error";
  $("by-tool").parentElement.hidden = meta.is_steps;
}

// The filters as the server takes them. Raises an error that says what cannot be read.
function queryOf({ query: words, inside, where, ...named }) {
  const found = new URLSearchParams();
  for (const [name, value] of Object.entries(named)) if (value) found.append(name, value);
  if (words.trim()) found.append(inside ? "text" : "q", words);
  const conditions = where.split(/,|\band\b/).map((part) => part.trim()).filter(Boolean);
  for (const condition of conditions) found.append("where", conditionOf(condition));
  return found;
}

const OPERATORS = { "=": "eq", "==": "eq", "!=": "ne", "<": "lt", "<=": "le", ">": "gt", ">=": "ge", has: "has", is: "null" };

function conditionOf(text) {
  const [, column, sign, value] = /^(\w+)\s*(==|=|!=|<=|>=|<|>|\bhas\b|\bis\b)\s*(.+)$/.exec(text) ?? [];
  const names = about.columns.map(({ name }) => name);
  if (!column) throw new Error(`"${text}" is no condition; write one as: turns > 5, reward <= 0.5, model has mini, reward is unknown`);
  if (!names.includes(column)) throw new Error(`There is no column "${column}". Columns are: ${names.join(", ")}`);
  if (sign === "is") return `${column}:${/^(null|unknown|none)$/.test(value) ? "null" : "notnull"}:`;
  return `${column}:${OPERATORS[sign]}:${value}`;
}

function listen(run, id) {
  const parts = new URLSearchParams(Object.entries({ run, id }).filter(([, value]) => value != null));
  const address = `/api/events?${parts}`;
  if (heard === address && events?.readyState !== EventSource.CLOSED) return;
  events?.close();
  heard = address;
  events = new EventSource(address);
  for (const [name, does] of Object.entries(EVENTS)) {
    events.addEventListener(name, (event) => does(JSON.parse(event.data)));
  }
  events.addEventListener("error", ({ target }) => {
    setTimeout(() => {
      if (target === events && target.readyState !== EventSource.OPEN) trouble(SILENT);
    }, SILENT_MS);
  });
  events.addEventListener("open", () => {
    if ($("trouble").textContent === SILENT) $("trouble").hidden = true;
  });
}

const heardAt = new Map(); // key of a run → when an event told its state

const COUNTED = ["tasks", "done", "failed", "pending", "passed", "checked", "pass_rate", "cost_usd", "cost_unknown"];

// A large run that writes its files says no numbers: those that it said last are still right.
function withNumbers(run) {
  const before = runs.get(run.key);
  if (!isAtWork(run) || run.done != null || before?.done == null) return run;
  return { ...run, ...Object.fromEntries(COUNTED.map((name) => [name, before[name]])) };
}

// The state of a run in an answer, unless an event told a later one while the server made the answer.
function latestRun(run, askedAt) {
  return heardAt.get(run.key) > askedAt ? runs.get(run.key) : withNumbers(run);
}

// What is known of the run that is shown, asked again; whether it is still shown.
async function askAgain() {
  const { key } = about.run;
  const askedAt = performance.now();
  const now = await ask(`/api/runs/${encodeURIComponent(key)}`);
  if (about.run.key !== key || meta === null) return false;
  about = { ...now, run: latestRun(now.run, askedAt) };
  meta = metaOf(about);
  return true;
}

let refreshAt = null;

// Rows have come or changed: once in a while, the same rows again.
function refreshSoon() {
  refreshAt ??= setTimeout(() => {
    refreshAt = null;
    if (!$("list").hidden) applyFilters({ stays: true });
  }, REFRESH_MS);
}

let chooseAt = null;

// What rows can be filtered by, and which columns they have, may have changed with them.
function chooseAgainSoon() {
  chooseAt ??= setTimeout(async () => {
    chooseAt = null;
    if (meta === null || !(await askAgain().catch(() => false))) return;
    takeChoices();
    startTable();
    drawOverview();
    drawRows({ force: true });
  }, REFRESH_MS);
}

function takeChoices() {
  source.choices = Object.fromEntries(["status", "tool", "flag", "model"].map((name) => [name, (about.choices[name] ?? []).map(([value]) => value)]));
}

const labelBytes = new Map(); // key of a run → bytes of its decisions, as last heard: each stream says them first

const EVENTS = {
  run(said) {
    const run = withNumbers(said);
    runs.set(run.key, run);
    heardAt.set(run.key, performance.now());
    showRun(run);
    if (about?.run.key !== run.key) return;
    about.run = run;
    if (meta === null) return;
    showRunState();
    drawOverview();
  },
  gone({ key }) {
    runs.delete(key);
    drawRuns();
  },
  index(index) {
    const before = about.index;
    about.index = index;
    if (before.rows !== index.rows || before.is_complete !== index.is_complete) {
      refreshSoon();
      // Of many rows it takes the server a while, so only once all are there.
      if (index.is_complete || index.rows < MOST_CHOSEN_AGAIN) chooseAgainSoon();
    }
    if (open?.live?.is_over) reread();
  },
  text(text) {
    showText(text);
    if (filters.inside && filters.query) refreshSoon();
  },
  async facts() {
    if (!(await askAgain())) return;
    describeRun();
    refreshSoon();
  },
  labels({ size }) {
    const before = labelBytes.get(about.run.key);
    if (before === size) return;
    labelBytes.set(about.run.key, size);
    showAgreement();
    if (before === undefined) return; // what is shown was read just now
    refreshSoon();
    if (open && !open.live) othersDecided();
  },
  in_flight: (flight) => showFlight(flight),
  live: (live) => showLive(live),
};

function showText(text) {
  $("text-words").textContent = !text || text.is_complete ? "" : text.error ?? `reading conversations: ${percent(text.bytes, text.of_bytes)}`;
}

function pageOf(place) {
  return Math.floor(place / PAGE_ROWS);
}

function put(number, list) {
  pages.delete(number);
  pages.set(number, list);
  if (pages.size > PAGES_KEPT) pages.delete(pages.keys().next().value);
}

async function rowsOf(number, top) {
  const parts = new URLSearchParams(query);
  if (top !== undefined) parts.append("place_of", top);
  parts.append("offset", number * PAGE_ROWS);
  parts.append("limit", PAGE_ROWS);
  return ask(runPath(`/rows?${parts}`));
}

const MOSTLY = 0.9;
const isMostlyRead = ({ is_complete: isComplete, bytes, of_bytes: ofBytes }) => isComplete || bytes > MOSTLY * ofBytes;

// The rows of an audit in progress are its steps; what they say of each task is counted at the end.
function auditWords(run, facts) {
  const tasks = plural(run.rows ?? 0, "task");
  const { verdicts } = facts ?? {};
  return verdicts ? `${tasks} audited, ${noneOr(verdicts.sound)} sound` : `Audit of ${tasks}: no verdicts yet`;
}

const source = {
  total: 0,
  choices: { status: [], tool: [], flag: [], model: [] },

  async start() {
    const { who, runs: list } = await ask("/api/runs");
    for (const run of list) runs.set(run.key, run);
    startRuns();
    startDeciding(who);
    startSteering();
  },

  parse(hash) {
    const [key, id, turn] = hash.slice(1).split("?")[0].split("/").map(decoded);
    if (key === "=compare") return { id: null, compared: hash.slice(1).split("/").slice(1).map(decoded) };
    return { key, id: id || null, turn: Number(turn) || null };
  },

  async enter({ key, id, compared }) {
    if (key) {
      if (about?.run.key !== key || meta === null) {
        showPlace("list");
        showReading(key);
        try {
          await openRun(key);
        } catch (error) {
          if (error.isShown) throw error; // a login
          leaveRun();
          showPlace("runs");
          drawRuns();
          trouble(error.message, { lasts: false });
          return false;
        }
      }
      listen(key, id);
      return true;
    }
    listen(null, null);
    leaveRun();
    showPlace(compared ? "compare" : "runs");
    document.title = compared ? "Compared runs" : "Runs";
    if (compared) await drawComparison(compared);
    else drawRuns();
    return false;
  },

  link(id, turn) {
    const parts = [about.run.key, id, turn].filter((part) => part != null);
    return `#${parts.map(encodeURIComponent).join("/")}${stateText()}`;
  },

  // What `drawOverview` says: of the whole run, whatever the filters leave.
  numbers() {
    const { run, facts, identity, choices: known, index } = about;
    // Before nearly all records are read, counts of rows say nothing of the run, unless nothing else does.
    const isRead = isMostlyRead(index);
    const statuses = isRead || run.done == null ? known.status ?? [] : [];
    const flagged = (wanted) => known.flag?.find(([name]) => name === wanted)?.[1] ?? 0;
    const number = (wanted) => statuses.find(([name]) => name === wanted)?.[1] ?? 0;
    const all = statuses.reduce((n, [, of]) => n + of, 0);
    const done = run.done ?? all - number("failed");
    const failed = run.failed ?? number("failed");
    return {
      words: run.is_audit ? auditWords(run, facts) : isRead || run.done != null ? null : `${plural(all, "conversation")} read so far`,
      steps: run.is_audit ? { done, failed, all: run.tasks, tasks: run.rows, verdicts: facts?.verdicts ?? null, against: isRead ? flagged("against its task") : null } : null,
      unreadable: index.unreadable,
      ended: done + failed, done, failed, tasks: run.tasks ?? meta.tasks, isRunning: isAtWork(run), passed: run.passed ?? flagged("passed"), judged: run.checked ?? (isRead || run.done == null ? flagged("passed") + flagged("not passed") : 0),
      completed: isRead ? number("completed") : null, sound: number("sound"), trainingRows: isAtWork(run) ? null : run.training_rows ?? facts?.funnel?.exports[0]?.rows ?? null,
      costUsd: run.cost_usd, costUnknown: run.cost_unknown ? facts?.spent.unknown || 1 : 0, leftS: run.now?.left_s ?? null,
      tookS: isRead && known.ended > identity.created ? known.ended - identity.created : null, statuses,
    };
  },
  has: () => true,
  readWords: () => isMostlyRead(about.index) ? "" : `, ${percent(about.index.bytes, about.index.of_bytes)} read`,
  isOpen: (read) => read.key === about.run.key,

  // `around` are the places in view: rows that are there stay until the new ones come.
  async find(wanted, { key, down }, around, top) {
    query = queryOf(wanted);
    if (key) query.append("order", key);
    if (key && down) query.append("down", "1");
    if (!key && hasSamples()) query.append("order", "samples");
    const numbers = [...new Set(around.map(pageOf))];
    const answers = await Promise.all(numbers.map((number) => rowsOf(number, top)));
    pages = new Map();
    coming.clear();
    answers.forEach((answer, n) => put(numbers[n], answer.rows));
    this.total = answers[0].total;
    showText(answers[0].text);
    return { matching: answers[0].matching, place: answers[0].place, summary: () => ask(runPath(`/charts?${queryOf(wanted)}`)) };
  },

  rowAt(place) {
    return pages.get(pageOf(place))?.[place % PAGE_ROWS];
  },

  async load(from, to) {
    const numbers = [...new Set([pageOf(from), pageOf(Math.max(from, to - 1))])].filter((number) => !pages.has(number));
    const into = pages;
    await Promise.all(numbers.map((number) => {
      const asked = coming.get(number) ?? rowsOf(number).finally(() => coming.delete(number));
      coming.set(number, asked);
      return asked.then((answer) => pages === into && put(number, answer.rows));
    }));
  },

  async read(id) {
    const parts = new URLSearchParams(query);
    parts.append("id", id);
    parts.append("who", reviewer());
    try {
      const read = await ask(runPath(`/record?${parts}`));
      return { key: about.run.key, ...read, siblings: null };
    } catch (error) {
      const live = error instanceof Missing && (await ask(runPath(`/live?${new URLSearchParams({ id })}`)));
      if (live && !live.is_over) return { key: about.run.key, ...liveRead(live) };
      if (!live || about.index.is_complete) throw error;
      trouble("The records are being read; this conversation comes.", { lasts: false });
      await new Promise((resolve) => setTimeout(resolve, READ_AGAIN_MS));
      return this.read(id);
    }
  },

  besideTurn: (turn, read) => [requestOf(turn, read), turnMark(turn)],
  beforeMessages: (read) => (read.live ? liveWords(read) : siblingsOf(read)),
  afterMessages: (read) => (read.live || read.step ? null : decisions(read)),

  keys: {
    list: { g: () => { location.hash = "#"; }, n: () => nextUndecided(), u: () => undo() },
    reader: {
      g: () => { location.hash = "#"; },
      n: () => nextUndecided(), u: () => undo(), x: () => markTurn(), m: () => $("note")?.focus(), s: () => nextSibling(),
      1: () => decideVerdict("keep"), 2: () => decideVerdict("reject"), 3: () => decideVerdict("fix"),
      4: () => prefer(true), 5: () => prefer(false),
    },
    other: {
      g: () => { location.hash = "#"; },
      j: () => stepRun(1), k: () => stepRun(-1), ArrowDown: () => stepRun(1), ArrowUp: () => stepRun(-1),
      x: () => chooseRun(), c: () => compareChosen(), "/": () => {},
    },
  },
};
