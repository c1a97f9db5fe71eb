// Where the page is and what its keys do.

let open = null; // what is read: {id, row, around, …}
let visits = 0;

const SOON_MS = 300; // what takes longer is said

async function show() {
  visits += 1;
  const visit = visits;
  const place = source.parse(location.hash);
  if (!$("trouble").dataset.lasts) $("trouble").hidden = true;
  try {
    if (!(await source.enter(place))) open = null;
    else if (visit !== visits) return;
    else if (place.id) await showConversation(place, visit);
    else await showList();
  } catch (error) {
    if (visit !== visits) return;
    if (!open) $("reader").replaceChildren();
    trouble(error.message, { lasts: !(error instanceof Missing) });
    if (error instanceof Missing) showList();
  }
}

async function showConversation({ id, turn }, visit) {
  if (open?.id !== id || !source.isOpen(open)) {
    const waits = setTimeout(() => visit === visits && showReadingOf(id), SOON_MS);
    const read = await source.read(id).finally(() => clearTimeout(waits));
    if (visit !== visits) return; // another was opened meanwhile
    if (!$("trouble").dataset.lasts) $("trouble").hidden = true;
    open = { id, ...read };
    drawConversation();
    window.scrollTo(0, 0);
    $("reader-title").focus({ preventScroll: true });
  }
  if (turn) focusOn(turnOf(turn));
}

// A long conversation takes a while: what was shown before is not taken for it.
function showReadingOf(id) {
  open = null;
  $("list").hidden = true;
  $("reader").hidden = false;
  $("reader").replaceChildren(h("p", { class: "soft", role: "status" }, `Reading ${visible(id)} …`));
}

function drawConversation() {
  $("list").hidden = true;
  $("reader").hidden = false;
  document.title = `${open.id} · ${meta.run_name}`;
  $("reader").replaceChildren(...conversation(open).flat(Infinity).filter(Boolean));
}

function turnOf(turn) {
  return $("reader").querySelector(`:scope > .messages > article[data-turn="${turn}"]`);
}

async function showList() {
  const before = open;
  open = null;
  document.title = `${meta.run_name} · ${PAGE}`;
  $("list").hidden = false;
  $("reader").hidden = true;
  $("reader").replaceChildren();
  if (takeState(location.hash)) await applyFilters();
  else keepAddress();
  drawRows({ force: true });
  if (before?.around.place != null && source.isOpen(before)) select(before.around.place);
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

function go(to) {
  if (to != null) location.hash = source.link(to);
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
  ArrowRight: () => go(open.around.after),
  ArrowLeft: () => go(open.around.before),
  e: nextError,
  t: () => setReasoning(!isReasoningOpen),
  r: () => toggle("details.raw"),
  l: () => toggle("details.training"),
  Escape: () => { location.hash = source.link(); },
};

const ANYWHERE = {
  "/": () => {
    if (open) {
      location.hash = source.link();
      showList(); // not when the address has changed: the field takes what is typed next
    }
    $("query").focus();
  },
  "?": () => $("help").showModal(),
};

// What drops over the page is closed by Escape, and by a click elsewhere.
function openDrop(target) {
  return target.closest?.("details.drop[open]") ?? null;
}

function closeDrops(but = null) {
  for (const drop of document.querySelectorAll("details.drop[open]")) if (drop !== but) drop.open = false;
}

function onKey(event) {
  const drop = event.key === "Escape" && openDrop(event.target);
  if (drop) {
    closeDrops();
    drop.querySelector("summary").focus();
    return;
  }
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
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
  const kind = open ? "reader" : $("list").hidden ? "other" : "list";
  const does = source.keys?.[kind]?.[event.key] ?? { reader: IN_READER, list: IN_LIST }[kind]?.[event.key] ?? ANYWHERE[event.key];
  if (!does) return;
  event.preventDefault();
  does(event);
}

// Each step of the funnel, and below it why some did not reach the next.
function funnelRows({ steps, samples, exports, not_needed: notNeeded }) {
  const line = (name, amount, words) => h("tr", {},
    name ? h("th", { scope: "row" }, name) : h("td"), h("td", { class: "number" }, amount === null ? "" : count(amount)), h("td", {}, words));
  const lost = (part, label) => Object.entries(part.lost).map(([reason, n]) => line("", n, `${label}: ${visible(reason)}`));
  const labels = { rows: "discarded", audited: "left out" };
  const masked = (part) => part.masked ? [
    line("", part.masked.turns, `of ${count(part.masked.of)} turns carry no loss`),
    ...Object.entries(part.masked.by_reason).map(([reason, n]) => line("", n, `masked: ${visible(reason)}`)),
  ] : [];
  const unneeded = notNeeded == null ? "" : `; ${count(notNeeded)} not needed`;
  const notes = { tasks: samples > 1 ? `${unneeded && "up to "}${count(samples)} samples per row${unneeded}` : "" };
  return [
    ...steps.flatMap((step) => [line(step.name, step.count, notes[step.name] ?? ""), ...lost(step, labels[step.name] ?? "of these")]),
    ...exports.flatMap((part) => [
      line("exported", part.rows, `rows of ${part.format} in ${visible(part.path)}, from ${count(part.used)} of ${count(part.tasks)} tasks`
        + (part.outdated ? "; conversations have ended since, export again" : "")),
      ...lost(part, "left out"),
      ...masked(part),
    ]),
  ];
}

// What came from prompt caches, by endpoint and by the number of the turn; null is unknown.
function describeCaches(caches) {
  $("caches").hidden = !caches?.endpoints.length;
  if ($("caches").hidden) return;
  const share = (value) => (value == null ? "unknown" : `${value.toFixed(1)}%`);
  const unknown = caches.unknown_turns ? `, unknown for ${plural(caches.unknown_turns, "turn")}` : "";
  $("caches-words").textContent = caches.share == null ? "unknown: the endpoint does not report them" : `${share(caches.share)} of the tokens in${unknown}`;
  $("caches-table").tBodies[0].replaceChildren(...caches.endpoints.map((one) => h("tr", {},
    h("th", { scope: "row" }, visible(`${one.model ?? "model unknown"}${one.endpoint ? ` at ${one.endpoint}` : ""}`)),
    h("td", { class: "number" }, short(one.input_tokens)), h("td", { class: "number" }, share(one.share)),
    h("td", { class: "number" }, one.repeated_share == null ? "" : share(one.repeated_share)),
    h("td", { class: "number" }, one.later_turns ? `${count(one.missed_turns)} of ${count(one.later_turns)}` : ""),
    h("td", { class: "number" }, one.lost_tokens ? `${short(one.lost_tokens)}${one.lost_usd == null ? "" : `, ${dollars(one.lost_usd)} more`}` : ""))));
  const name = ({ from, to }) => (to == null ? `${from} and later` : from === to ? `${from}` : `${from} to ${to}`);
  $("caches-turns").textContent = caches.by_turn.length > 1 ? `By turn: ${caches.by_turn.map((one) => `${name(one)}: ${share(one.share)}`).join(", ")}` : "";
}

function describeRun() {
  const state = meta.is_running ? ", while the run was in progress" : "";
  const bad = meta.bad_rows ? `, ${plural(meta.bad_rows, "bad row")}` : "";
  const written = meta.written_at ? ` · written ${moment(meta.written_at)}${state}` : "";
  $("about").textContent = `${visible(meta.dataset)}${bad} · begun ${moment(meta.created)}${written}`;
  $("funnel-words").textContent = meta.funnel ? "and what became of the others" : meta.is_counting ? "being counted" : "unknown: the dataset or a manifest cannot be read; `stats` names it";
  $("funnel-table").tBodies[0].replaceChildren(...(meta.funnel ? funnelRows(meta.funnel) : []));
  drawOverview();
  describeCaches(meta.caches);
  $("errors").hidden = !meta.errors.length;
  $("errors-count").textContent = count(meta.errors.reduce((total, error) => total + error.count, 0));
  $("errors-table").tBodies[0].replaceChildren(...meta.errors.map((error) => h("tr", {},
    h("th", { scope: "row" }, error.class), h("td", { class: "number" }, count(error.count)),
    h("td", {}, source.has(error.id) ? h("a", { href: source.link(error.id) }, error.id) : error.id, ": ", error.message))));
  const options = Object.entries(meta.meaning).filter(([, value]) => value !== null && value !== false && String(value) !== "");
  $("config-count").textContent = `${options.length} that decide what the data is`;
  $("config-table").tBodies[0].replaceChildren(...options.map(([name, value]) => h("tr", {},
    h("th", { scope: "row" }, name), h("td", {}, typeof value === "string" ? value : JSON.stringify(value)))));
}

async function start() {
  listenToTable();
  listenToTabs();
  window.addEventListener("hashchange", show);
  document.addEventListener("keydown", onKey);
  document.addEventListener("click", ({ target }) => target.isConnected && closeDrops(openDrop(target) ?? target.closest?.("details.drop")));
  $("show-help").addEventListener("click", () => $("help").showModal());
  try {
    await source.start();
    await show();
  } catch (error) {
    if (!error.isShown) trouble(error.message);
  }
  document.documentElement.dataset.ready = "yes";
}

start();
