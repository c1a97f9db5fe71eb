// Results of calls as what they are: differences, tables, JSON, other text.

const SHOWN_CHARS = 8000;
const SHOWN_OF_RESULT = 1500; // characters of arguments and results, up to the end of a sentence or line
const SHOWN_ROWS = 100;
const SHOWN_LINES = 24; // of JSON, which is folded beyond

// Text as it is; a very long one in part, until the rest is asked for. `draw` makes its content.
function textBlock(text, kind = "", draw = visible, most = SHOWN_CHARS) {
  // What may be higher than its place is scrolled by keys, too.
  const isHigh = text.length > 2000 || text.split("\n", SHOWN_LINES).length === SHOWN_LINES;
  const block = h("pre", { class: `text ${kind}`, tabindex: isHigh ? 0 : null });
  if (text.length <= most * 1.5) return fill(block, {}, [draw(text)]);
  const more = h("button", { type: "button", class: "more", click: () => block.replaceChildren(...[draw(text)].flat()) },
    `… show all ${count(text.length)} characters`);
  return fill(block, {}, [draw(beginningOf(text, most)), more]);
}

// The beginning of a text, up to the last end of a line or sentence that is not far from `most`.
function beginningOf(text, most) {
  const head = text.slice(0, most);
  const end = Math.max(head.lastIndexOf("\n"), ...[...head.matchAll(/[.!?](?=\s)/g)].slice(-1).map((match) => match.index));
  return end > most / 2 ? head.slice(0, end + 1) : head;
}

const shortBlock = (text, kind = "", draw = visible) => textBlock(text, kind, draw, SHOWN_OF_RESULT);

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
function valuesBlock(values, kind = "", draw = (value) => shortBlock(typeof value === "string" ? value : jsonText(value))) {
  return h("dl", { class: `arguments ${kind}` }, Object.entries(values).map(([name, value]) => {
    const isShort = name.length <= 16 && (typeof value === "string" ? value.length <= 60 && !value.includes("\n") : isPlain(value));
    return [h("dt", { class: isShort && "short" }, name), h("dd", { class: isShort && "short" }, draw(value))];
  }));
}

const isEmpty = (value) => value === null || value === "";

// {block, exitCode} of the result of a call. The exit code of a command is a badge beside the name of
// the tool, so it is no part of the block.
function resultParts({ content }) {
  const value = parsed(content);
  if (!isObject(value) || typeof value.exit_code !== "number") return { block: resultBlock(content), exitCode: null };
  const { exit_code: exitCode, ...rest } = value;
  const block = Object.values(rest).every(isEmpty) ? h("p", { class: "soft result" }, "no output") : resultOfValues(rest);
  return { block, exitCode };
}

// Values by name without the empty ones; a lone text without its name.
function resultOfValues(values) {
  const said = Object.entries(values).filter(([, value]) => !isEmpty(value));
  if (said.length === 1 && ["stdout", "output"].includes(said[0][0])) {
    const block = valueBlock(said[0][1]);
    block.classList.add("result");
    return block;
  }
  return valuesBlock(Object.fromEntries(said), "result", valueBlock);
}

// The result of a call: what is a JSON object by name; lists of records as tables.
function resultBlock(text) {
  const value = parsed(text);
  if (isObject(value) && Object.values(value).some((one) => !isEmpty(one))) return resultOfValues(value);
  const block = Array.isArray(value) ? valueBlock(value) : plainBlock(text);
  block.classList.add("result");
  return block;
}

function valueBlock(value) {
  if (typeof value === "string") return plainBlock(value);
  const table = recordsIn(value);
  if (table) return tableBlock(table, jsonText(value));
  return isLong(value) ? treeBlock(value) : shortBlock(jsonText(value));
}

// Text that is no JSON.
function plainBlock(text, kind = "") {
  if (isBinary(text)) return fold(`facts binary ${kind}`, `binary data, ${plural(text.length, "character")}`, () => shortBlock(text));
  if (hasColours(text)) return colouredBlock(text, kind);
  if (isDifference(text)) return shortBlock(text, `diff ${kind}`, differenceLines);
  const table = separatedIn(text);
  return table ? tableBlock(table, text, kind) : shortBlock(text, kind);
}

const BINARY_SHARE = 0.1;

// Many characters that no text has: controls but tabs and ends of lines, and what could not be decoded.
function isBinary(text) {
  const head = text.slice(0, 4000);
  const strange = head.match(/[\x00-\x08\x0e-\x1a\x1c-\x1f\x7f\ufffd]/g)?.length ?? 0;
  return strange > BINARY_SHARE * head.length;
}

// Colours of a terminal (SGR), and what erases the rest of a line, as programs write it beside them.
const COLOURS = /(\x1b\[[0-9;:]*m|\x1b\[[0-2]?K)/;

// Other escapes stay to be seen, so a text that has any is drawn as it is.
function hasColours(text) {
  return text.includes("\x1b[") && !text.split(COLOURS).some((part, n) => n % 2 === 0 && part.includes("\x1b"));
}

function colouredBlock(text, kind) {
  const box = h("div", { class: kind });
  const asText = h("button", { type: "button", class: "more", click: () => box.replaceWith(shortBlock(text, kind)) }, "in the colours of a terminal · as text");
  return fill(box, {}, [shortBlock(text, kind, colouredSpans), asText]);
}

function colouredSpans(text) {
  let style = {};
  return text.split(COLOURS).map((part, n) => {
    if (n % 2 === 0) return part && h("span", { class: Object.values(style).join(" ") || null }, part);
    if (part.endsWith("m")) style = styleAfter(style, part.slice(2, -1).split(/[;:]/).map(Number));
    return null;
  });
}

const COLOUR_NAMES = [null, "red", "green", "yellow", "blue", "magenta", "cyan", null]; // black and white are the ink

function styleAfter(before, codes) {
  let style = { ...before };
  const take = (colour) => (COLOUR_NAMES[colour] ? style.colour = `ansi-${COLOUR_NAMES[colour]}` : delete style.colour);
  for (let n = 0; n < codes.length; n += 1) {
    const code = codes[n];
    if (code === 0) style = {};
    else if (code === 1) style.weight = "ansi-bold";
    else if (code === 22) delete style.weight;
    else if (code === 38 || code === 48) {
      // One of 256 colours, of which the first 16 have names, or red, green and blue.
      if (codes[n + 1] === 5 && code === 38) take(codes[n + 2] < 16 ? codes[n + 2] % 8 : 0);
      n += codes[n + 1] === 5 ? 2 : 4;
    } else if (code === 39) delete style.colour;
    else if ((code >= 30 && code < 38) || (code >= 90 && code < 98)) take(code % 10);
  }
  return style;
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

const PREVIEW_CHARS = 60;

// What is in an object or list, as far as it fits a line.
function previewOf(value) {
  const size = Array.isArray(value) ? plural(value.length, "item") : plural(Object.keys(value).length, "key");
  const parts = [];
  for (const [name, one] of Object.entries(value)) {
    if (!isPlain(one)) continue;
    const text = typeof one === "string" ? one.slice(0, PREVIEW_CHARS) : JSON.stringify(one);
    parts.push(Array.isArray(value) ? text : `${name} ${text}`);
    if (parts.join(", ").length > PREVIEW_CHARS) break;
  }
  const said = parts.join(", ");
  return said ? `${size} · ${said.length > PREVIEW_CHARS ? `${said.slice(0, PREVIEW_CHARS)}…` : said}` : size;
}

// JSON whose objects and lists unfold.
function treeBlock(value) {
  const entries = Object.entries(value);
  const line = ([name, one]) => isPlain(one) || !Object.keys(one).length
    ? h("li", {}, h("strong", {}, name), ": ", textBlock(typeof one === "string" ? one : JSON.stringify(one)))
    : h("li", {}, fold("branch", `${name}: ${previewOf(one)}`, () => treeBlock(one)));
  const list = h("ul", { class: "tree" });
  // As many again as are there, so that a list of a million is not drawn at once.
  const grow = (from) => {
    const to = Math.max(SHOWN_LINES, 4 * from);
    list.append(...entries.slice(from, to).map(line));
    if (entries.length <= to) return;
    const more = h("button", { type: "button", class: "more", click: (event) => {
      const next = event.target.parentElement;
      grow(to);
      next.nextElementSibling?.querySelector("summary")?.focus();
      next.remove();
    } }, `… ${count(entries.length - to)} more`);
    list.append(h("li", {}, more));
  };
  grow(0);
  return list;
}
