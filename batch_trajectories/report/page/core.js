// Elements, numbers and the data of the page. Text of models and tools reaches the page here alone,
// and always as text.

const $ = (id) => document.getElementById(id);

// An element with attributes (functions are listeners, false and null are left out) and children.
function h(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

function svg(name, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
}

function fill(element, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(key, value);
    else if (value !== false && value != null) element.setAttribute(key, value === true ? "" : value);
  }
  for (const child of children.flat(Infinity)) {
    if (child == null || child === false) continue;
    element.append(child instanceof Node ? child : visible(child));
  }
  return element;
}

// Characters that would act instead of being seen: terminal escapes, and turns of the direction.
const ACTING = /[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]/g;
const hex = (c) => c.charCodeAt(0).toString(16).padStart(4, "0");

function visible(text) {
  return String(text).replace(ACTING, (c) => `⟨U+${hex(c).toUpperCase()}⟩`);
}

function jsonText(value) {
  return JSON.stringify(value, null, 2).replace(ACTING, (c) => `\\u${hex(c)}`);
}

const grouped = new Intl.NumberFormat("en");
const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

const count = (n) => (n == null ? "?" : grouped.format(n));
const short = (n) => (n == null ? "?" : n < 10000 ? grouped.format(n) : compact.format(n));
const percent = (part, whole) => (whole ? `${Math.round((1000 * part) / whole) / 10}%` : "–");
const plural = (n, word) => `${count(n)} ${word}${n === 1 ? "" : "s"}`;

const digits = (n) => (n == null ? "?" : String(Number(n.toPrecision(3))));

function checkWords(row) {
  const reward = `reward ${row.reward}`;
  return row.passed == null ? reward : `${row.passed ? "passed" : "not passed"}, ${reward}`;
}

function dollars(usd) {
  if (usd == null) return "?";
  if (usd === 0) return "$0";
  return usd < 0.1 ? `$${Number(usd.toPrecision(2))}` : `$${usd.toFixed(2)}`;
}

function seconds(s) {
  if (s == null) return "?";
  if (s < 1) return `${Math.round(s * 1000)} ms`;
  if (s < 60) return `${s.toFixed(s < 10 ? 1 : 0)} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min ${Math.floor(s % 60)} s`;
  return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
}

function moment(epoch) {
  if (epoch == null) return "?";
  const two = (n) => String(n).padStart(2, "0");
  const d = new Date(epoch * 1000);
  const day = `${d.getFullYear()}-${two(d.getMonth() + 1)}-${two(d.getDate())}`;
  return `${day} ${two(d.getHours())}:${two(d.getMinutes())}:${two(d.getSeconds())}`;
}

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

// There is no such run or conversation, which goes with the address.
class Missing extends Error {}

// What is known of the run: `_describe_run` in writer.py names the keys. Set by the source.
let meta = null;

// `source` is where the data comes from, one object for each kind of page: source.js of the report,
// and of the page of many runs. It has:
//
//   start()              promise: what the page needs at first is there
//   parse(hash)          {id, turn} of an address, and what else the source has in it
//   enter(place)         promise: whether the table or a conversation is to be shown there
//   link(id, turn)       the address of a conversation; of the table without an id
//   total, choices       number of rows; {status, tool, flag, model: [names]} for the filters
//   has(id)              whether there is such a row, as far as it is known
//   readWords()          how much of the records is read, as words after the number of rows
//   isOpen(read)         whether what is read is still that
//   find(filters, order, places, top)  promise of {matching, summary, place}: number of rows, promise
//                        of `summarize`'s, where the row with the id `top` is; rows of these places are here
//                        then
//   rowAt(place)         a row of what was found; undefined while it is not here
//   load(from, to)       promise: rows of these places are here
//   read(id)             promise of {row, record, form, around: {before, after, place, matching}}
//
// and what only a page with a server can show: see `besideTurn`, `beforeMessages`, `afterMessages`
// and `keys` where they are called.

// What went wrong with the data stays on the page; what went wrong with a link goes with it.
function trouble(message, { lasts = true } = {}) {
  $("trouble").dataset.lasts = lasts ? "yes" : "";
  $("trouble").textContent = message;
  $("trouble").hidden = false;
}
