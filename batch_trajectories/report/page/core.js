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

function embedded(id) {
  const element = $(id);
  const text = element.textContent;
  element.remove();
  return text;
}

const meta = JSON.parse(embedded("meta-data"));
const rows = [];
const CHUNKS_KEPT = 8;
const chunks = new Map(); // number → records; those inside the page are chunk 0
let inlineRecords = embedded("records-data");

function addRows(list) {
  for (const values of list) {
    rows.push(Object.fromEntries(meta.columns.map((name, n) => [name, values[n]])));
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

async function loadRows() {
  const inline = JSON.parse(embedded("rows-data"));
  if (meta.files === null) addRows(inline);
  else await load("rows.js");
}

async function recordOf(row) {
  if (meta.files === null) {
    if (inlineRecords !== null) chunks.set(0, JSON.parse(inlineRecords));
    inlineRecords = null;
  } else if (!chunks.has(row.chunk)) await load(`chunk-${row.chunk}.js`);
  const chunk = chunks.get(row.chunk);
  if (!chunk) throw new Error("This page and the files beside it do not belong together.");
  const { training_form: form, ...record } = chunk[row.place];
  return { form, record: { ...record, tools: record.tools.map((n) => meta.tools[n]) } };
}

// What went wrong with the data stays on the page; what went wrong with a link goes with it.
function trouble(message, { lasts = true } = {}) {
  $("trouble").dataset.lasts = lasts ? "yes" : "";
  $("trouble").textContent = message;
  $("trouble").hidden = false;
}
