// Where the page is (#, #id, #id/turn) and what its keys do.

const byId = new Map();
let open = null; // the row that is read

function currentPlace() {
  const [id, turn] = location.hash.slice(1).split("/");
  try {
    return { id: decodeURIComponent(id), turn: Number(turn) || null };
  } catch {
    return { id, turn: null };
  }
}

async function show() {
  const { id, turn } = currentPlace();
  const row = byId.get(id) ?? null;
  if (!$("trouble").dataset.lasts) $("trouble").hidden = true;
  if (id && !row) trouble(`There is no trajectory ${visible(id)} in this report.`, { lasts: false });
  $("list").hidden = row !== null;
  $("reader").hidden = row === null;
  if (!row) return showList();
  const place = matching.indexOf(row);
  if (open !== row) {
    open = row;
    document.title = `${row.id} · ${meta.run_name}`;
    let read;
    try {
      read = await recordOf(row);
    } catch (error) {
      return trouble(error.message);
    }
    if (open !== row) return undefined; // another was opened meanwhile
    const around = {
      before: matching[place - 1], after: place < 0 ? undefined : matching[place + 1],
      place: place < 0 ? "" : `${count(place + 1)} of ${count(matching.length)}`,
    };
    $("reader").replaceChildren(...conversation(read, row, around).filter(Boolean));
    window.scrollTo(0, 0);
    $("reader-title").focus({ preventScroll: true });
  }
  if (turn) focusOn($("reader").querySelector(`:scope > .messages > article[data-turn="${turn}"]`));
  return undefined;
}

function showList() {
  const before = open;
  open = null;
  document.title = `${meta.run_name} · report`;
  $("reader").replaceChildren();
  drawRows({ force: true });
  if (before && matching.includes(before)) select(matching.indexOf(before));
}

function focusOn(element) {
  if (!element) return;
  element.focus({ preventScroll: true });
  element.scrollIntoView({ block: "start" });
}

// The next or previous element after the one that is read; the first from the top of the page.
function step(selector, by) {
  const all = [...$("reader").querySelectorAll(selector)].filter((element) => element.offsetParent);
  const now = all.findIndex((element) => element === document.activeElement);
  focusOn(all[now < 0 ? (by > 0 ? 0 : all.length - 1) : Math.max(0, Math.min(all.length - 1, now + by))]);
}

function nextError() {
  const all = [...$("reader").querySelectorAll(".call.is-error, .message > .mark")];
  const now = all.findIndex((element) => element === document.activeElement);
  const next = all[(now + 1) % all.length];
  next?.setAttribute("tabindex", "-1");
  focusOn(next);
}

function toggle(selector) {
  const fold = $("reader").querySelector(selector);
  fold.open = !fold.open;
  focusOn(fold.querySelector("summary"));
}

function go(by) {
  const to = matching[matching.indexOf(open) + by];
  if (open && to && matching.includes(open)) location.hash = link(to);
}

const IN_LIST = {
  j: () => select(selected + 1),
  k: () => select(selected - 1),
  ArrowDown: () => select(selected + 1),
  ArrowUp: () => select(selected - 1),
};

const IN_READER = {
  j: () => step(":scope > .messages > article", 1),
  k: () => step(":scope > .messages > article", -1),
  ArrowRight: () => go(1),
  ArrowLeft: () => go(-1),
  e: nextError,
  t: () => setReasoning(!isReasoningOpen),
  r: () => toggle("details.raw"),
  l: () => toggle("details.training"),
  Escape: () => { location.hash = "#"; },
};

const ANYWHERE = {
  "/": () => {
    if (open) location.hash = "#";
    setTimeout(() => $("query").focus());
  },
  "?": () => $("help").showModal(),
};

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || $("help").open) return;
  const field = event.target.closest?.("input, select, textarea");
  if (field) {
    if (event.key === "Escape") {
      if (field.id === "query") setFilters({ query: "" });
      field.blur();
    } else if (event.key === "ArrowDown" && field.id === "query") {
      event.preventDefault();
      select(0);
    }
    return;
  }
  const does = (open ? IN_READER : IN_LIST)[event.key] ?? ANYWHERE[event.key];
  if (!does) return;
  event.preventDefault();
  does();
}

// Each step of the funnel, and below it why some did not reach the next.
function funnelRows({ steps, samples, exports, not_needed: notNeeded }) {
  const line = (name, amount, words) => h("tr", {},
    h("th", { scope: "row" }, name), h("td", { class: "number" }, amount === null ? "" : count(amount)), h("td", {}, words));
  const lost = (part) => Object.entries(part.lost).map(([reason, n]) => line("", n, `left out: ${visible(reason)}`));
  const masked = (part) => part.masked ? [
    line("", part.masked.turns, `of ${count(part.masked.of)} turns carry no loss`),
    ...Object.entries(part.masked.by_reason).map(([reason, n]) => line("", n, `masked: ${visible(reason)}`)),
  ] : [];
  const unneeded = notNeeded == null ? "" : `; ${count(notNeeded)} not needed`;
  const notes = { tasks: samples > 1 ? `${unneeded && "up to "}${count(samples)} samples per row${unneeded}` : "" };
  return [
    ...steps.flatMap((step) => [line(step.name, step.count, notes[step.name] ?? ""), ...lost(step)]),
    ...exports.flatMap((part) => [
      line("exported", part.rows, `rows of ${part.format} in ${visible(part.path)}, from ${count(part.used)} of ${count(part.tasks)} tasks`
        + (part.outdated ? "; conversations have ended since, export again" : "")),
      ...lost(part),
      ...masked(part),
    ]),
  ];
}

function describeRun() {
  const state = meta.is_running ? ", while the run was in progress" : "";
  const bad = meta.bad_rows ? `, ${plural(meta.bad_rows, "bad row")}` : "";
  $("about").textContent =
    `${visible(meta.dataset)}${bad} · begun ${moment(meta.created)} · written ${moment(meta.written_at)}${state}`;
  $("funnel-words").textContent = meta.funnel ? "and why the others were left out" : "unknown: the dataset or a manifest cannot be read; `stats` names it";
  $("funnel-table").tBodies[0].replaceChildren(...(meta.funnel ? funnelRows(meta.funnel) : []));
  $("health").hidden = !meta.health.length;
  $("health-count").textContent = "of the whole run, by named checks";
  $("health-table").tBodies[0].replaceChildren(...meta.health.map((found) => h("tr", {},
    h("th", { scope: "row" }, found.name), h("td", { class: "number" }, `${count(found.found)} of ${count(found.of)}`),
    h("td", {}, found.problem, ": ", ...found.examples.flatMap((id, n) => [n ? ", " : "",
      byId.has(id) ? h("a", { href: link({ id }) }, visible(id)) : visible(id)])))));
  $("errors").hidden = !meta.errors.length;
  $("errors-count").textContent = count(meta.errors.reduce((total, error) => total + error.count, 0));
  $("errors-table").tBodies[0].replaceChildren(...meta.errors.map((error) => h("tr", {},
    h("th", { scope: "row" }, error.class), h("td", { class: "number" }, count(error.count)),
    h("td", {}, byId.has(error.id) ? h("a", { href: link(error) }, error.id) : error.id, ": ", error.message))));
  const options = Object.entries(meta.meaning).filter(([, value]) => value !== null && value !== false && String(value) !== "");
  $("config-count").textContent = `${options.length} that decide what the data is`;
  $("config-table").tBodies[0].replaceChildren(...options.map(([name, value]) => h("tr", {},
    h("th", { scope: "row" }, name), h("td", {}, typeof value === "string" ? value : JSON.stringify(value)))));
}

async function start() {
  try {
    await loadRows();
  } catch (error) {
    trouble(error.message);
  }
  for (const row of rows) {
    // An edited prompt under its old id leaves two records; links lead to the later one.
    byId.set(row.id, row);
  }
  if (window.matchMedia("(max-width: 44rem)").matches) $("overview").open = false;
  describeRun();
  startTable();
  window.addEventListener("hashchange", show);
  document.addEventListener("keydown", onKey);
  $("show-help").addEventListener("click", () => $("help").showModal());
  await show();
  document.documentElement.dataset.ready = "yes";
}

start();
