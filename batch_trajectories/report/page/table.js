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

// Only in runs of which something was checked.
const CHECK_COLUMN = {
  isShown: () => meta.is_checked,
  key: "reward", name: "Check", number: true,
  cell: (row) => row.reward == null ? null : h("span", { class: row.passed === false ? "failed" : false, title: checkWords(row) },
    row.passed === false ? "✗ " : row.passed ? "✓ " : "", Number(row.reward.toPrecision(3))),
};

// Only in runs with a call that looked for the solution of its task.
const LEAK_COLUMN = {
  isShown: () => meta.has_leaks,
  key: "leaks", name: "Leaks", number: true,
  cell: (row) => row.leaks ? h("span", { class: "failed", title: visible(row.leak_calls.join("\n")) }, count(row.leaks)) : null,
};

// Only in runs whose endpoint has a cache.
const CACHE_COLUMN = {
  isShown: () => meta.has_caches,
  key: "cached_share", name: "Cached", number: true, wide: true, less: true,
  cell: (row) => row.cached_share == null ? null : [percent(row.cached_share, 1),
    row.cache_misses ? h("span", { class: "failed", title: `turns that missed the cache: ${row.missed_turns.join(", ")}` }, ` ✗${count(row.cache_misses)}`) : null],
};

const COLUMNS = [
  { key: "status", name: "Status", cell: (row) => h("span", { class: `status ${statusKind(row.status)}` }, row.status) },
  { key: "id", name: "Trajectory", cell: titleCell },
  { key: "turns", name: "Turns", number: true, cell: (row) => count(row.turns) },
  {
    key: "failed_calls", name: "Calls", number: true,
    cell: (row) => [count(row.calls), row.failed_calls ? h("span", { class: "failed" }, ` ${count(row.failed_calls)} failed`) : null],
  },
  { key: "input_tokens", name: "In", number: true, less: true, cell: (row) => short(row.input_tokens) },
  CACHE_COLUMN,
  { key: "output_tokens", name: "Out", number: true, less: true, cell: (row) => short(row.output_tokens) },
  { key: "cost_usd", name: "Cost", number: true, wide: true, less: true, cell: (row) => dollars(row.cost_usd) },
  { key: "duration_s", name: "Time", number: true, wide: true, cell: (row) => seconds(row.duration_s) },
  CHECK_COLUMN,
  LEAK_COLUMN,
  { key: "finished_at", name: "Ended", number: true, less: true, cell: (row) => moment(row.finished_at).slice(5) },
];

function titleCell(row) {
  const words = row.error ? `${row.error}: ${row.reason ?? row.prompt}` : row.prompt;
  return [h("a", { href: source.link(row.id) }, row.id), h("span", { class: "snippet" }, words)];
}

// Rows come first, then what is drawn of all of them; an answer that is late is left out.
async function applyFilters({ stays = false } = {}) {
  searches += 1;
  const search = searches;
  try {
    const { matching: all, summary } = await source.find(filters, order, stays ? [drawn[0], Math.max(drawn[0], drawn[1] - 1)] : [0]);
    if (search !== searches) return;
    showFound(all, stays);
    const found = await summary;
    if (search !== searches) return;
    drawTiles(found);
    drawCharts(found, (picked) => setFilters(picked));
  } catch (error) {
    if (search === searches) trouble(error.message, { lasts: false });
  }
}

function showFound(all, stays) {
  matching = all;
  $("found").textContent =
    all === source.total ? `${count(all)} shown` : `${count(all)} of ${count(source.total)} shown`;
  $("table").setAttribute("aria-rowcount", all + 1);
  if (!stays) {
    selected = -1;
    $("scroller").scrollTop = 0;
  }
  drawRows({ force: true });
}

// The words are those of the field, which may have been typed since the last search.
function setFilters(changes) {
  clearTimeout(later);
  Object.assign(filters, { query: $("query").value }, changes);
  showFilters();
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
}

function drawHeads() {
  $("heads").replaceChildren(...columns.map((column) => {
    const is = order.key === column.key;
    return h("th", { scope: "col", class: columnClass(column), "aria-sort": is && (order.down ? "descending" : "ascending") },
      h("button", { type: "button", click: () => sortBy(column) }, column.name, is ? (order.down ? " ↓" : " ↑") : ""));
  }));
}

function columnClass(column) {
  return [column.number && "number", column.wide && "wide", column.less && "less", column.key === "id" && "title"].filter(Boolean).join(" ");
}

function sortBy(column) {
  if (order.key !== column.key) Object.assign(order, { key: column.key, down: Boolean(column.number) });
  else if (order.down === Boolean(column.number)) order.down = !order.down;
  else order.key = null; // the third time: as the records were written
  drawHeads();
  applyFilters();
  [...$("heads").querySelectorAll("button")][columns.indexOf(column)].focus();
}

const heightOf = (places) => Math.min(places * ROW_HEIGHT, MOST_HEIGHT);

// The first row in view, with a fraction; rows beyond the most height are further apart than drawn.
function firstInView() {
  const { scrollTop, clientHeight } = $("scroller");
  const height = heightOf(matching);
  if (height === matching * ROW_HEIGHT) return scrollTop / ROW_HEIGHT;
  const part = Math.min(1, scrollTop / (height - clientHeight + ROW_HEIGHT));
  return part * (matching - clientHeight / ROW_HEIGHT + 1);
}

function scrollToPlace(place) {
  const { clientHeight } = $("scroller");
  const height = heightOf(matching);
  $("scroller").scrollTop = height === matching * ROW_HEIGHT ? place * ROW_HEIGHT
    : (place / (matching - clientHeight / ROW_HEIGHT + 1)) * (height - clientHeight + ROW_HEIGHT);
}

// Draw the rows that are in view and some around them; the others are two empty rows, as high.
// Rows that are not here yet are empty until they come.
function drawRows({ force = false } = {}) {
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
  }, columns.map((column) => h("td", { class: columnClass(column) }, column.cell(row))));
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
  columns = (meta.is_audit ? AUDIT_COLUMNS : COLUMNS).filter((column) => column.isShown?.() ?? true);
  for (const [name, names] of Object.entries(source.choices)) choices(`by-${name}`, names);
  $("model-label").hidden = source.choices.model.length < 2;
  drawHeads();
  showFilters();
}

function listenToTable() {
  $("query").addEventListener("input", () => {
    clearTimeout(later);
    later = setTimeout(setFilters, 120);
  });
  $("filters").addEventListener("change", ({ target }) => {
    const name = target.id.replace(/^by-/, "");
    if (target.id === "query") return;
    setFilters({ [name]: target.type === "checkbox" ? target.checked : target.value });
  });
  $("filters").addEventListener("submit", (event) => (event.preventDefault(), select(0)));
  $("filters").addEventListener("reset", (event) => {
    event.preventDefault();
    setFilters(Object.fromEntries(Object.keys(filters).map((name) => [name, ""])));
  });
  $("scroller").addEventListener("scroll", () => drawRows(), { passive: true });
  window.addEventListener("resize", () => drawRows());
}
