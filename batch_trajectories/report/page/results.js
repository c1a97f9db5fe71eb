// Results of calls as what they are: differences, tables, JSON, other text.

const SHOWN_CHARS = 8000;
const SHOWN_ROWS = 100;
const SHOWN_LINES = 24; // of JSON, which is folded beyond

// Text as it is; a very long one in part, until the rest is asked for. `draw` makes its content.
function textBlock(text, kind = "", draw = visible) {
  // What may be higher than its place is scrolled by keys, too.
  const isHigh = text.length > 2000 || text.split("\n", SHOWN_LINES).length === SHOWN_LINES;
  const block = h("pre", { class: `text ${kind}`, tabindex: isHigh ? 0 : null });
  if (text.length <= SHOWN_CHARS * 1.5) return fill(block, {}, [draw(text)]);
  const more = h("button", { type: "button", class: "more", click: () => block.replaceChildren(...[draw(text)].flat()) },
    `… show all ${count(text.length)} characters`);
  return fill(block, {}, [draw(text.slice(0, SHOWN_CHARS)), more]);
}

function fold(kind, words, make, isOpen = false) {
  const box = h("details", { class: kind }, h("summary", {}, words));
  const put = () => box.childElementCount === 1 && box.append(make());
  box.addEventListener("toggle", () => box.open && put());
  if (isOpen) {
    put();
    box.open = true;
  }
  return box;
}

function jsonBlock(value) {
  return textBlock(jsonText(value));
}

// The object or list that a JSON text holds, its numbers as they are written; undefined for other text.
function parsed(text) {
  if (!/^\s*[{[]/.test(text)) return undefined;
  const exact = (key, value, context) =>
    typeof value === "number" && context && String(value) !== context.source ? JSON.rawJSON?.(context.source) ?? value : value;
  try {
    return JSON.parse(text, exact);
  } catch {
    return undefined;
  }
}

const isObject = (value) => value !== undefined && !Array.isArray(value);
const isPlain = (value) => value === null || typeof value !== "object" || Boolean(JSON.isRawJSON?.(value));

// The values of an object by name, texts as texts.
function valuesBlock(values, kind = "", draw = (value) => textBlock(typeof value === "string" ? value : jsonText(value))) {
  return h("dl", { class: `arguments ${kind}` }, Object.entries(values).map(([name, value]) => [
    h("dt", {}, name),
    h("dd", {}, draw(value)),
  ]));
}

// The result of a call: what is a JSON object by name; lists of records as tables.
function resultBlock(text) {
  const value = parsed(text);
  if (isObject(value) && Object.keys(value).length) return valuesBlock(value, "result", valueBlock);
  const block = Array.isArray(value) ? valueBlock(value) : plainBlock(text);
  block.classList.add("result");
  return block;
}

function valueBlock(value) {
  if (typeof value === "string") return plainBlock(value);
  const table = recordsIn(value);
  if (table) return tableBlock(table, jsonText(value));
  return isLong(value) ? treeBlock(value) : textBlock(jsonText(value));
}

// Text that is no JSON.
function plainBlock(text, kind = "") {
  if (isDifference(text)) return textBlock(text, `diff ${kind}`, differenceLines);
  const table = separatedIn(text);
  return table ? tableBlock(table, text, kind) : textBlock(text, kind);
}

function isDifference(text) {
  const head = text.slice(0, 4000);
  return /^(diff --git |@@ -\d+(,\d+)? \+\d+(,\d+)? @@)/m.test(head) || /^--- .*\n\+\+\+ .*\n/m.test(head);
}

const LINE_KINDS = [[/^(diff |index |--- |\+\+\+ )/, "about"], [/^@@/, "place"], [/^\+/, "added"], [/^-/, "removed"]];

// A line each, so that the text is the same; its sign says what the colour says.
function differenceLines(text) {
  return text.split(/(?<=\n)/).map((line) => h("span", { class: LINE_KINDS.find(([begin]) => begin.test(line))?.[1] }, line));
}

// A list of objects whose values are plain, as {heads, cells}.
function recordsIn(value) {
  if (!Array.isArray(value) || value.length < 2) return null;
  if (!value.every((one) => !isPlain(one) && isObject(one) && Object.values(one).every(isPlain))) return null;
  const heads = [...new Set(value.slice(0, SHOWN_ROWS).flatMap((one) => Object.keys(one)))];
  if (!heads.length || heads.length > 30) return null;
  const cell = (one, name) => (Object.hasOwn(one, name) ? (typeof one[name] === "string" ? one[name] : JSON.stringify(one[name])) : "");
  return { heads, rows: value.length, cells: value.slice(0, SHOWN_ROWS).map((one) => heads.map((name) => cell(one, name))) };
}

// Lines with as many commas or tabs each, at least three, as {heads, cells}.
function separatedIn(text) {
  if (text.length > 500_000) return null;
  const lines = text.replace(/\r?\n$/, "").split(/\r?\n/);
  if (lines.length < 3) return null;
  const mark = lines[0].includes("\t") ? "\t" : ",";
  const heads = fieldsOf(lines[0], mark);
  if (heads.length < 2 || heads.length > 30 || heads.some((name) => !/^[\w .()%#/-]{1,40}$/.test(name.trim()))) return null;
  const cells = lines.slice(1).map((line) => fieldsOf(line, mark));
  if (!cells.every((fields) => fields.length === heads.length)) return null;
  return { heads, rows: cells.length, cells: cells.slice(0, SHOWN_ROWS) };
}

function fieldsOf(line, mark) {
  const field = mark === "," ? /("(?:[^"]|"")*"|[^,]*)(,|$)/gy : /([^\t]*)(\t|$)/gy;
  const fields = [];
  for (const [, text, end] of line.matchAll(field)) {
    fields.push(text.startsWith('"') && mark === "," ? text.slice(1, -1).replaceAll('""', '"') : text);
    if (!end) break;
  }
  return fields;
}

function tableBlock({ heads, cells, rows }, text, kind = "") {
  const numbers = heads.map((_, n) => cells.every((fields) => fields[n] === "" || !Number.isNaN(Number(fields[n]))));
  const words = rows > cells.length ? `the first ${count(cells.length)} of ${plural(rows, "row")}` : plural(rows, "row");
  const box = h("div", { class: `as-table ${kind}` });
  const asText = h("button", { type: "button", class: "more", click: () => box.replaceWith(textBlock(text, kind)) }, `${words} · as text`);
  const table = h("table", { class: "plain" },
    h("thead", {}, h("tr", {}, heads.map((name) => h("th", { scope: "col" }, name)))),
    h("tbody", {}, cells.map((fields) => h("tr", {}, fields.map((field, n) => h("td", { class: numbers[n] && "number" }, field.slice(0, 500)))))));
  return fill(box, {}, [h("div", { class: "wide", tabindex: 0, role: "group", "aria-label": "table" }, table), asText]);
}

function isLong(value) {
  let lines = 0;
  const visit = (one, depth) => {
    lines += 1;
    if (!isPlain(one) && lines <= SHOWN_LINES && depth < 50) for (const item of Object.values(one)) visit(item, depth + 1);
    else if (depth >= 50) lines = Infinity;
  };
  visit(value, 0);
  return lines > SHOWN_LINES;
}

// JSON whose objects and lists unfold.
function treeBlock(value) {
  const entries = Object.entries(value);
  const line = ([name, one]) => isPlain(one) || !Object.keys(one).length
    ? h("li", {}, h("strong", {}, name), ": ", textBlock(typeof one === "string" ? one : JSON.stringify(one)))
    : h("li", {}, fold("branch", `${name}: ${Array.isArray(one) ? plural(one.length, "item") : plural(Object.keys(one).length, "key")}`, () => treeBlock(one)));
  const list = h("ul", { class: "tree" }, entries.slice(0, SHOWN_ROWS).map(line));
  if (entries.length > SHOWN_ROWS) {
    list.append(h("li", {}, h("button", { type: "button", class: "more", click: (event) => event.target.parentElement.replaceWith(...entries.slice(SHOWN_ROWS).map(line)) },
      `… ${count(entries.length - SHOWN_ROWS)} more`)));
  }
  return list;
}
