// The table: filtered, sorted, and drawn only where it is looked at.

const ROW_HEIGHT = 46; // as in page.css
const ROWS_AROUND = 12;

const filters = { query: "", status: "", tool: "", flag: "", model: "" };
const order = { key: null, down: false };
let matching = [];
let selected = -1;
let isChecked = false; // something judged one of the rows at least
let drawn = [-1, -1];

// Only in runs of which something was checked, see startTable.
const CHECK_COLUMN = {
  key: "reward", name: "Check", number: true,
  cell: (row) => row.reward == null ? null : h("span", { class: row.passed === false ? "failed" : false, title: checkWords(row) },
    row.passed === false ? "✗ " : row.passed ? "✓ " : "", Number(row.reward.toPrecision(3))),
};

// Only in runs with a call that looked for the solution of its task.
const LEAK_COLUMN = {
  key: "leaks", name: "Leaks", number: true,
  cell: (row) => row.leaks ? h("span", { class: "failed", title: visible(row.leak_calls.join("\n")) }, count(row.leaks)) : null,
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
  { key: "output_tokens", name: "Out", number: true, less: true, cell: (row) => short(row.output_tokens) },
  { key: "cost_usd", name: "Cost", number: true, wide: true, less: true, cell: (row) => dollars(row.cost_usd) },
  { key: "duration_s", name: "Time", number: true, wide: true, cell: (row) => seconds(row.duration_s) },
  { key: "finished_at", name: "Ended", number: true, less: true, cell: (row) => moment(row.finished_at).slice(5) },
];

const FLAGS = {
  "failed calls": (row) => row.failed_calls > 0,
  "an error": (row) => row.error !== null,
  "turns without reasoning": (row) => row.reasoned < row.turns,
  "a suspected leak": (row) => row.leaks > 0,
  "no tool call": (row) => row.calls === 0,
  "a training row": (row) => row.exported === "training",
  "a partial row": (row) => row.exported === "partial",
  "no row: rejected": (row) => row.exported === "rejects",
  "not checked or scored": (row) => row.reward == null && isChecked,
};

function link(row, turn) {
  return `#${encodeURIComponent(row.id)}${turn ? `/${turn}` : ""}`;
}

function titleCell(row) {
  const words = row.error ? `${row.error}: ${row.reason ?? row.prompt}` : row.prompt;
  return [h("a", { href: link(row) }, row.id), h("span", { class: "snippet" }, words)];
}

function matches(row, words) {
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

function applyFilters() {
  const words = filters.query.toLowerCase().split(/\s+/).filter(Boolean);
  matching = rows.filter((row) => matches(row, words));
  if (order.key) matching.sort(compareBy(order.key, order.down));
  selected = -1;
  $("found").textContent =
    matching.length === rows.length ? `${count(rows.length)} shown` : `${count(matching.length)} of ${count(rows.length)} shown`;
  $("table").setAttribute("aria-rowcount", matching.length + 1);
  $("scroller").scrollTop = 0;
  drawTiles(matching);
  drawCharts(matching, (picked) => setFilters(picked));
  drawRows({ force: true });
}

function setFilters(changes) {
  Object.assign(filters, changes);
  $("query").value = filters.query;
  for (const name of ["status", "tool", "flag", "model"]) $(`by-${name}`).value = filters[name];
  applyFilters();
}

function drawHeads() {
  $("heads").replaceChildren(...COLUMNS.map((column) => {
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
  [...$("heads").querySelectorAll("button")][COLUMNS.indexOf(column)].focus();
}

// Draw the rows that are in view and some around them; the others are two empty rows, as high.
function drawRows({ force = false } = {}) {
  const scroller = $("scroller");
  const from = Math.max(0, Math.floor(scroller.scrollTop / ROW_HEIGHT) - ROWS_AROUND);
  const to = Math.min(matching.length, Math.ceil((scroller.scrollTop + scroller.clientHeight) / ROW_HEIGHT) + ROWS_AROUND);
  if (!force && drawn[0] === from && drawn[1] === to) return;
  const hadFocus = $("rows").contains(document.activeElement);
  drawn = [from, to];
  $("rows").replaceChildren(gap(from), ...matching.slice(from, to).map((row, n) => drawRow(row, from + n)), gap(matching.length - to));
  if (hadFocus) linkOf(selected)?.focus({ preventScroll: true });
}

function gap(count) {
  const cell = h("td"); // without a span, which would make room for columns that are hidden
  cell.style.height = `${count * ROW_HEIGHT}px`;
  return h("tr", { class: "gap", "aria-hidden": "true" }, cell);
}

function drawRow(row, place) {
  return h("tr", {
    "data-place": place,
    "aria-rowindex": place + 2,
    class: place === selected && "selected",
    click: (event) => {
      if (!event.target.closest("a") && !String(getSelection())) location.hash = link(row);
    },
    focusin: () => markSelected(place),
  }, COLUMNS.map((column) => h("td", { class: columnClass(column) }, column.cell(row))));
}

function linkOf(place) {
  return $("rows").querySelector(`tr[data-place="${place}"] a`);
}

function markSelected(place) {
  selected = place;
  for (const row of $("rows").children) row.classList.toggle("selected", row.dataset.place === String(place));
}

function select(place) {
  if (!matching.length) return;
  const next = Math.max(0, Math.min(matching.length - 1, place));
  const scroller = $("scroller");
  const top = next * ROW_HEIGHT;
  const room = scroller.clientHeight - 2 * ROW_HEIGHT;
  if (top < scroller.scrollTop) scroller.scrollTop = top;
  else if (top > scroller.scrollTop + room) scroller.scrollTop = top - room;
  selected = next;
  drawRows({ force: true });
  linkOf(next)?.focus({ preventScroll: true });
  scroller.scrollIntoView({ block: "nearest" });
}

function choices(id, names) {
  $(id).replaceChildren(h("option", { value: "" }, "any"), ...names.map((name) => h("option", { value: name }, name)));
}

function startTable() {
  if (meta.is_audit) startAudit();
  isChecked = rows.some((row) => row.reward != null);
  if (isChecked) COLUMNS.splice(-1, 0, CHECK_COLUMN);
  if (rows.some((row) => row.leaks)) COLUMNS.splice(-1, 0, LEAK_COLUMN);
  const names = (pick) => tally(rows, (row) => pick(row).map((name) => [name, 1])).map(([name]) => name);
  const models = names((row) => [row.model]);
  choices("by-status", names((row) => [row.status]));
  choices("by-tool", names((row) => Object.keys(row.tools)));
  choices("by-flag", [...Object.keys(FLAGS).filter((flag) => !meta.is_audit && rows.some(FLAGS[flag])), ...names((row) => row.flags)]);
  choices("by-model", models);
  $("model-label").hidden = models.length < 2;
  for (const name of ["status", "tool", "flag", "model"]) {
    $(`by-${name}`).addEventListener("change", (event) => setFilters({ [name]: event.target.value }));
  }
  let later;
  $("query").addEventListener("input", (event) => {
    clearTimeout(later);
    later = setTimeout(() => setFilters({ query: event.target.value }), 120);
  });
  $("filters").addEventListener("submit", (event) => (event.preventDefault(), select(0)));
  $("filters").addEventListener("reset", (event) => {
    event.preventDefault();
    setFilters({ query: "", status: "", tool: "", flag: "", model: "" });
  });
  $("scroller").addEventListener("scroll", () => drawRows(), { passive: true });
  window.addEventListener("resize", () => drawRows());
  drawHeads();
  applyFilters();
}
