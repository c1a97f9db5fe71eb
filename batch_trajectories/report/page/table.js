// The table: filtered, sorted, and drawn only where it is looked at.

const ROW_HEIGHT = 46; // as in page.css
const ROWS_AROUND = 12;
const MOST_HEIGHT = 15_000_000; // pixels, below what browsers can lay out; beyond, a pixel is more than one

const filters = { query: "", status: "", tool: "", flag: "", model: "" };
const order = { key: null, down: false };
let columns = [];
let matching = 0; // how many rows the filters leave
let selected = -1;
let drawn = [-1, -1];
let searches = 0;
let later; // a search that waits for the next key

const failedMark = (words) => h("span", { class: "failed" }, words);
const twoLines = (text) => h("div", { class: "two-lines" }, text);

// Columns that only some runs have, by the data that they show: those that say nothing are left out.
const COLUMNS_OF_DATA = ["answer", "expected", "reward", "cost_usd", "turns", "calls", "input_tokens", "output_tokens", "duration_s"];
const isWorthAColumn = (key, value) => value != null && value !== "" && value !== 0 && !(["turns", "reward"].includes(key) && value === 1);
const has = (key) => meta.has.includes(key);
const hasSamples = () => meta.samples > 1 && !meta.is_audit;

// What a verdict is called: of conversations, and of the steps of an audit.
const verdictNames = () => meta.is_steps ? ["as expected", "against its task"] : ["passed", "not passed"];
const allColumns = () => meta.is_audit ? AUDIT_COLUMNS : meta.is_steps ? STEP_COLUMNS : COLUMNS;

// `rem` is the width, or `share` of the whole in percent; the prompt has the rest. `isThere`: whether the run has it; `isExtra`: shown if chosen.
const COLUMNS = [
  { key: "passed", name: "Verdict", rem: 7.6, isThere: () => meta.is_checked, cell: verdictCell },
  { key: "status", name: "Status", rem: 7.6, isExtra: () => meta.is_checked, cell: (row) => statusMark(row.status) },
  { key: "id", name: "Prompt", rem: 0, cell: titleCell },
  { key: "answer", name: "Answer", share: 20, less: true, isThere: () => has("answer"), cell: (row) => twoLines(row.answer) },
  { key: "expected", name: "Expected", rem: 8, less: true, isThere: () => has("expected"), cell: (row) => row.expected == null ? null : twoLines(row.expected) },
  {
    key: "reward", name: "Reward", number: true, rem: 5, isThere: () => has("reward"),
    cell: (row) => row.reward == null ? null : h("span", { title: checkWords(row) }, digits(row.reward)),
  },
  { key: "cost_usd", name: "Cost", number: true, rem: 6.4, less: true, isThere: () => has("cost_usd"), cell: (row) => row.cost_usd == null ? null : dollars(row.cost_usd) },
  { key: "turns", name: "Turns", number: true, rem: 4.6, isThere: () => has("turns"), cell: (row) => count(row.turns) },
  {
    key: "failed_calls", name: "Calls", number: true, rem: 7.4, isThere: () => has("calls"),
    cell: (row) => [count(row.calls), row.failed_calls ? failedMark(` ${count(row.failed_calls)} failed`) : null],
  },
  {
    key: "leaks", name: "Leaks", number: true, rem: 4.6, isThere: () => meta.has_leaks,
    cell: (row) => row.leaks ? h("span", { class: "failed", title: visible(row.leak_calls.join("\n")) }, count(row.leaks)) : null,
  },
  {
    key: "cached_share", name: "Cached", number: true, rem: 6.8, less: true, isThere: () => meta.has_caches,
    cell: (row) => row.cached_share == null ? null : [percent(row.cached_share, 1),
      row.cache_misses ? h("span", { class: "failed", title: `turns that missed the cache: ${row.missed_turns.join(", ")}` }, ` ✗${count(row.cache_misses)}`) : null],
  },
  { key: "duration_s", name: "Time", number: true, rem: 7, less: true, isThere: () => has("duration_s"), cell: (row) => seconds(row.duration_s) },
  { key: "input_tokens", name: "In", number: true, rem: 4.6, isThere: () => has("input_tokens"), isExtra: () => true, cell: (row) => short(row.input_tokens) },
  { key: "output_tokens", name: "Out", number: true, rem: 4.6, isThere: () => has("output_tokens"), isExtra: () => true, cell: (row) => short(row.output_tokens) },
  { key: "model", name: "Model", rem: 10, less: true, isThere: () => source.choices.model.length > 1, cell: (row) => twoLines(row.model) },
  { key: "finished_at", name: "Ended", number: true, rem: 9, isExtra: () => true, cell: (row) => moment(row.finished_at).slice(5) },
];
let chosenColumns = null; // keys of the columns that the user chose; null: what fits the run

// On narrow screens a long name goes on in a second line, after one of its parts.
const statusMark = (status) => h("span", { class: `status ${statusKind(status)}` }, status.split(/(?<=_)/).map((part, n) => [n > 0 && h("wbr"), part]));

function passMark(passed) {
  const [good, bad] = verdictNames();
  return h("span", { class: `status ${passed ? "good" : "bad"} as-verdict` }, passed ? `✓ ${good}` : `✗ ${bad}`);
}

function verdictCell(row) {
  if (row.passed == null) return statusMark(row.status);
  return h("div", { class: "two-lines" }, passMark(row.passed),
    row.status === "completed" ? null : h("small", {}, row.status));
}

// The prompt, and the id under it. Of samples that stand together, the first one says how many passed.
function titleCell(row, place) {
  const words = row.error ? `${row.error}: ${row.reason ?? row.prompt}` : row.prompt;
  const link = h("a", { href: source.link(row.id) }, row.id);
  const { group } = row;
  const isGrouped = group && !order.key && !meta.is_audit;
  const before = isGrouped && place > 0 ? source.rowAt(place - 1) : null;
  const isGood = group && (meta.is_steps ? group.passed === group.samples : group.passed);
  const badge = group && h("span", { class: `badge ${isGood ? "good" : group.judged ? "bad" : ""}` },
    group.judged ? `${count(group.passed)} of ${count(group.samples)} ${meta.is_steps ? "as expected" : "passed"}` : plural(group.samples, "sample"));
  // On narrow screens, which have no room for its column.
  const answer = row.answer && h("span", { class: "snippet answer" }, row.step ? `${row.step}: ` : "→ ", row.answer);
  if (before?.prompt_id === row.prompt_id && isGrouped) {
    return h("div", { class: "sample" }, row.step ? null : h("span", { class: "snippet" }, `sample ${row.sample}`), h("span", { class: "under" }, link, answer));
  }
  return [h("span", { class: "prompt" }, words), h("span", { class: "under" }, link, badge, answer)];
}

const PROMPT_REM = 16;
const ANSWER_REM = 14;
const LEAST_FIRST = ["duration_s", "cached_share", "turns", "failed_calls", "expected", "cost_usd"];

// Those that leave room for the prompt. On narrow screens the style leaves out more.
function fittingColumns(list) {
  if (!matchMedia("(min-width: 62rem)").matches) return list;
  const rem = parseFloat(getComputedStyle(document.documentElement).fontSize);
  const room = Math.min(window.innerWidth - 2 * rem, 90 * rem) / rem;
  const needed = (some) => some.reduce((sum, column) => sum + (column.rem || (column.share ? ANSWER_REM : PROMPT_REM)), 0);
  let some = list;
  for (const key of LEAST_FIRST) if (needed(some) > room) some = some.filter((column) => column.key !== key);
  return some;
}

function fitColumns() {
  if (meta === null) return;
  const before = columns.length;
  chooseColumns();
  if (columns.length !== before) drawHeads();
  drawRows({ force: true });
}

function chooseColumns() {
  const there = allColumns().filter((column) => column.isThere?.() ?? true);
  columns = chosenColumns ? there.filter((column) => chosenColumns.includes(column.key) || column.key === "id")
    : fittingColumns(there.filter((column) => !column.isExtra?.()));
  $("table").classList.toggle("chosen", chosenColumns !== null);
  $("table").style.minWidth = chosenColumns ? `${columns.reduce((rem, column) => rem + (column.rem || 14), 0)}rem` : "";
  const box = (column) => {
    const input = h("input", { type: "checkbox", value: column.key, disabled: column.key === "id", change: pickColumns });
    input.checked = columns.includes(column);
    return h("label", {}, input, " ", column.name);
  };
  $("column-boxes").replaceChildren($("column-boxes").querySelector("legend"), ...there.map(box),
    h("button", { type: "button", disabled: !chosenColumns, click: () => takeColumns(null) }, "Usual columns"));
}

function pickColumns(event) {
  event.stopPropagation(); // what it redraws is no filter
  const { target } = event;
  takeColumns([...$("column-boxes").querySelectorAll("input:checked")].map((input) => input.value));
  $("column-boxes").querySelector(`input[value="${target.value}"]`).focus();
}

function takeColumns(keys) {
  chosenColumns = keys;
  chooseColumns();
  drawHeads();
  drawRows({ force: true });
  keepAddress();
}

// Rows come first, then what is drawn of all of them; an answer that is late is left out.
async function applyFilters({ stays = false } = {}) {
  if (meta === null) return; // another run is being read
  searches += 1;
  const search = searches;
  try {
    const top = stays ? rowOnTop() : null;
    const { matching: all, summary, place } = await source.find(filters, order, stays ? [drawn[0], Math.max(drawn[0], drawn[1] - 1)] : [0], top?.id);
    if (search !== searches) return;
    showFound(all, stays, top && place != null ? place - top.place : 0);
    askSummary = summary;
    if (tab === "charts") await drawSummary();
  } catch (error) {
    if (search === searches) trouble(error.message, { lasts: false });
  }
}

let askSummary = null; // asks for the numbers of the rows that were found last

// Tiles and charts, once they are looked at.
async function drawSummary() {
  if (!askSummary) return;
  const search = searches;
  const ask = askSummary;
  askSummary = null;
  if (!$("charts").childElementCount) $("charts").replaceChildren(h("p", { class: "soft" }, "counting …"));
  try {
    const found = await ask();
    if (search !== searches || meta === null) return;
    drawTiles(found);
    drawCharts(found, (picked) => setFilters(picked));
  } catch (error) {
    if (search === searches) trouble(error.message, { lasts: false });
  }
}

// The row on top of the view; none while the beginning of the table is in view, which stays there.
function rowOnTop() {
  const place = Math.floor(firstInView());
  const row = place > 0 ? source.rowAt(place) : null;
  return row && { place, id: row.id };
}

// `moved`: how many rows have come before the one on top of the view.
function showFound(all, stays, moved = 0) {
  const first = firstInView() + moved;
  matching = all;
  const of = all === source.total ? "" : ` of ${count(source.total)}`;
  $("found").textContent = `${count(all)}${of} shown${source.readWords()}`;
  $("table").setAttribute("aria-rowcount", all + 1);
  if (!stays) {
    selected = -1;
    $("scroller").scrollTop = 0;
    held = { top: -1, first: 0 };
  } else if (selected >= 0) selected += moved;
  drawRows({ force: true });
  if (stays && first > 0) {
    scrollToPlace(first);
    drawRows({ force: true });
  }
}

// The words are those of the field, which may have been typed since the last search.
function setFilters(changes) {
  clearTimeout(later);
  Object.assign(filters, { query: $("query").value }, changes);
  showFilters();
  keepAddress();
  if (!$("trouble").dataset.lasts) $("trouble").hidden = true;
  return applyFilters();
}

// The form as the filters are.
function showFilters() {
  for (const [name, value] of Object.entries(filters)) {
    const field = $(name === "query" ? name : `by-${name}`);
    if (field.type === "checkbox") field.checked = Boolean(value);
    else field.value = value;
  }
  const used = Object.entries(filters).filter(([name, value]) => name !== "query" && value).length;
  $("more-filters").textContent = used ? `Filters (${used})` : "Filters";
  if (["model", "label", "where", "inside"].some((name) => filters[name])) openFilters(true);
}

function openFilters(isOpen) {
  $("filters").classList.toggle("open", isOpen);
  $("more-filters").setAttribute("aria-expanded", String(isOpen));
}

const isBox = (name) => $(`by-${name}`)?.type === "checkbox";
const noFilters = () => Object.fromEntries(Object.keys(filters).map((name) => [name, isBox(name) ? false : ""]));

function drawHeads() {
  $("heads").replaceChildren(...columns.map((column) => {
    const is = order.key === column.key;
    const head = h("th", { scope: "col", class: columnClass(column), "aria-sort": is && (order.down ? "descending" : "ascending") },
      column.isFixed ? h("span", {}, column.name)
        : h("button", { type: "button", click: () => sortBy(column) }, column.name, is ? (order.down ? " ↓" : " ↑") : ""));
    head.style.width = column.rem ? `${column.rem}rem` : column.share ? `${column.share}%` : "";
    return head;
  }));
}

function columnClass(column) {
  return [column.number && "number", column.less && "less", ["passed", "status"].includes(column.key) && "verdict-column", column.key === "id" && "title"].filter(Boolean).join(" ");
}

function sortBy(column) {
  if (order.key !== column.key) Object.assign(order, { key: column.key, down: Boolean(column.number) });
  else if (order.down === Boolean(column.number)) order.down = !order.down;
  else order.key = null; // the third time: as the records were written
  drawHeads();
  keepAddress();
  applyFilters();
  $("heads").children[columns.indexOf(column)].querySelector("button").focus();
}

// Where the table was scrolled to. Of very many rows a pixel is several, so its height alone does not say.
let held = { top: -1, first: 0 };

const heightOf = (places) => Math.min(places * ROW_HEIGHT, MOST_HEIGHT);

// The first row in view, with a fraction; rows beyond the most height are further apart than drawn.
function firstInView() {
  const { scrollTop, clientHeight } = $("scroller");
  const height = heightOf(matching);
  if (height === matching * ROW_HEIGHT) return scrollTop / ROW_HEIGHT;
  if (scrollTop === held.top) return held.first;
  const part = Math.min(1, scrollTop / (height - clientHeight + ROW_HEIGHT));
  return part * (matching - clientHeight / ROW_HEIGHT + 1);
}

function scrollToPlace(place) {
  const { clientHeight } = $("scroller");
  const height = heightOf(matching);
  $("scroller").scrollTop = height === matching * ROW_HEIGHT ? place * ROW_HEIGHT
    : (place / (matching - clientHeight / ROW_HEIGHT + 1)) * (height - clientHeight + ROW_HEIGHT);
  held = { top: $("scroller").scrollTop, first: place };
}

// Draw the rows that are in view and some around them; the others are two empty rows, as high.
// Rows that are not here yet are empty until they come.
function drawRows({ force = false } = {}) {
  if (meta === null) return; // the rows of another run are being read
  const scroller = $("scroller");
  const first = firstInView();
  const from = Math.max(0, Math.floor(first) - ROWS_AROUND);
  const to = Math.min(matching, Math.ceil(first + scroller.clientHeight / ROW_HEIGHT) + ROWS_AROUND);
  const isExact = heightOf(matching) === matching * ROW_HEIGHT;
  if (!force && isExact && drawn[0] === from && drawn[1] === to) return;
  const hadFocus = $("rows").contains(document.activeElement);
  drawn = [from, to];
  const places = Array.from({ length: to - from }, (_, n) => from + n);
  const isMissing = places.some((place) => source.rowAt(place) === undefined);
  const above = isExact ? from * ROW_HEIGHT : Math.max(0, scroller.scrollTop - (first - from) * ROW_HEIGHT);
  const below = heightOf(matching) - above - places.length * ROW_HEIGHT;
  $("rows").replaceChildren(gap(above), ...places.map((place) => drawRow(source.rowAt(place), place)), gap(Math.max(0, below)));
  if (hadFocus) linkOf(selected)?.focus({ preventScroll: true });
  if (isMissing) {
    const search = searches;
    source.load(from, to).then(
      () => search === searches && drawn[0] === from && drawn[1] === to && drawRows({ force: true }),
      (error) => search === searches && trouble(error.message, { lasts: false }),
    );
  }
}

function gap(height) {
  const cell = h("td"); // without a span, which would make room for columns that are hidden
  cell.style.height = `${height}px`;
  return h("tr", { class: "gap", "aria-hidden": "true" }, cell);
}

function drawRow(row, place) {
  if (!row) return h("tr", { class: "coming", "data-place": place, "aria-rowindex": place + 2 }, columns.map((column) => h("td", { class: columnClass(column) })));
  return h("tr", {
    "data-place": place,
    "aria-rowindex": place + 2,
    class: place === selected && "selected",
    click: (event) => {
      if (!event.target.closest("a") && !String(getSelection())) location.hash = source.link(row.id);
    },
    focusin: () => markSelected(place),
  }, columns.map((column) => h("td", { class: columnClass(column) }, column.cell(row, place))));
}

function linkOf(place) {
  return $("rows").querySelector(`tr[data-place="${place}"] a`);
}

function markSelected(place) {
  selected = place;
  for (const row of $("rows").children) row.classList.toggle("selected", row.dataset.place === String(place));
}

function select(place) {
  if (!matching) return;
  const next = Math.max(0, Math.min(matching - 1, place));
  const scroller = $("scroller");
  const room = Math.max(1, scroller.clientHeight / ROW_HEIGHT - 2);
  const first = firstInView();
  if (next < first) scrollToPlace(next);
  else if (next > first + room) scrollToPlace(next - room);
  selected = next;
  drawRows({ force: true });
  const to = linkOf(next);
  if (to) to.focus({ preventScroll: true });
  else source.load(next, next + 1).then(() => {
    if (selected !== next) return;
    drawRows({ force: true });
    linkOf(next)?.focus({ preventScroll: true });
  }, (error) => trouble(error.message, { lasts: false }));
  scroller.scrollIntoView({ block: "nearest" });
}

function choices(id, names) {
  $(id).replaceChildren(h("option", { value: "" }, "any"), ...names.map((name) => h("option", { value: name }, name)));
}

// The table of a run, whose data the source has; without rows yet.
function startTable() {
  if (meta.is_audit) startAudit();
  chooseColumns();
  for (const [name, names] of Object.entries(source.choices)) choices(`by-${name}`, names);
  $("model-label").hidden = source.choices.model.length < 2;
  // On a wide screen the button has only rare filters to show, which a report may lack.
  $("more-filters").classList.toggle("has-rare", [...$("filters").querySelectorAll(".rare")].some((label) => !label.hidden));
  drawHeads();
  showFilters();
}

function listenToTable() {
  $("query").addEventListener("input", () => {
    clearTimeout(later);
    later = setTimeout(setFilters, 120);
  });
  $("more-filters").addEventListener("click", () => openFilters(!$("filters").classList.contains("open")));
  $("filters").addEventListener("change", ({ target }) => {
    if ($("columns").contains(target)) return;
    const name = target.id.replace(/^by-/, "");
    if (target.id === "query") return;
    setFilters({ [name]: target.type === "checkbox" ? target.checked : target.value });
  });
  $("filters").addEventListener("submit", (event) => (event.preventDefault(), select(0)));
  $("filters").addEventListener("reset", (event) => {
    event.preventDefault();
    setFilters(noFilters());
  });
  $("scroller").addEventListener("scroll", () => drawRows(), { passive: true });
  window.addEventListener("resize", fitColumns);
}
