// Charts of the rows that the filters leave, drawn as SVG.

const WIDTH = 340;
const NAMES = 116; // the part of a row of bars that is for names
const PER_CHARACTER = 6.4; // at most, in the size of charts; what stands behind a bar decides its room
const MOST_NAME = 17;

// A chart that would be empty is left out.
function chart(title, words, body) {
  return body && h("figure", {}, h("figcaption", {}, h("b", {}, title), h("span", {}, words)), body);
}

// Bars of {name, parts: [[class, amount]], words, pick}; what is longest is as wide as there is room.
function bars(title, words, items) {
  if (!items.length) return null;
  const shown = items.slice(0, 10);
  const most = Math.max(1, ...shown.map((item) => item.parts.reduce((t, [, n]) => t + n, 0)));
  const room = WIDTH - NAMES - 14 - PER_CHARACTER * Math.max(0, ...shown.map((item) => item.words.length));
  const drawn = shown.map((item, n) => {
    let x = NAMES;
    const parts = item.parts.map(([kind, amount]) => {
      const width = (amount / most) * room;
      const rect = svg("rect", { class: kind, x, y: 5, width, height: 13, rx: 2 });
      x += width;
      return rect;
    });
    const pick = item.pick && {
      role: "button",
      tabindex: 0,
      "aria-label": `Filter by ${item.name}: ${item.words}`,
      click: item.pick,
      keydown: (event) => ["Enter", " "].includes(event.key) && (event.preventDefault(), item.pick()),
    };
    const name = item.name.length > MOST_NAME ? `${item.name.slice(0, MOST_NAME - 1)}…` : item.name;
    // What is picked lies over the words, and has a name of its own.
    return svg("g", { transform: `translate(0 ${n * 23})` },
      svg("title", {}, `${item.name}: ${item.words}`),
      svg("text", { x: NAMES - 6, y: 16, "text-anchor": "end" }, name),
      parts,
      svg("text", { class: "amount", x: x + 5, y: 16 }, item.words),
      svg("rect", { class: "hit", width: WIDTH, height: 23, ...pick }));
  });
  const hidden = items.length - shown.length;
  const text = hidden > 0 ? `${words} · ${hidden} more not drawn` : words;
  const label = `${title}: ${shown.map((item) => `${item.name} ${item.words}`).join(", ")}`;
  return chart(title, text, svg("svg",
    { viewBox: `0 0 ${WIDTH} ${Math.max(1, shown.length) * 23}`, role: "group", "aria-label": label }, drawn));
}

const HIGH = 84; // pixels of the tallest bar
const LOW = 98; // where bars stand; above them is the number of conversations of the tallest
const WHOLE_WIDTH = 22; // at most, of the bar of a whole number

// Bars of {all, passed, failed}, one upon the other; what was not judged has the tone of no verdict.
function stackedBars(steps, width, titleOf) {
  const tallest = Math.max(1, ...steps.map(({ all }) => all));
  const bars = steps.map(({ all, passed, failed }, n) => {
    let y = LOW;
    const part = (kind, amount) => {
      if (!amount) return null;
      const height = Math.max(1.5, (amount / tallest) * HIGH);
      y -= height;
      return svg("rect", { class: kind, x: 4 + n * width, y, width: Math.max(1, width - 1.5), height }, svg("title", {}, titleOf(n)));
    };
    return [part("good", passed), part("bad", failed), part("plain-bar", all - passed - failed)];
  });
  return [bars, svg("text", { class: "soft", x: 4, y: LOW - HIGH - 3 }, plural(tallest, rowWord()))];
}

const stepsOf = ({ heights, passed = [], failed = [] }) => heights.map((all, n) => ({ all, passed: passed[n] ?? 0, failed: failed[n] ?? 0 }));
const stepWords = ({ all, passed, failed }) => passed || failed ? `${count(all)}, ${count(passed)} passed, ${count(failed)} did not` : count(all);

// A chart of what `histogramOf` counted, whose values differ; `unit` stands at the axis.
function histogram(title, unit, found, format, { whole = false } = {}) {
  const { known, missing, low, high, median, p90, grows, edges } = found;
  const unknown = missing ? ` · unknown for ${count(missing)}` : "";
  if (!known || low === high) return null;
  const steps = stepsOf(found);
  const isEach = whole && high - low + 1 === steps.length;
  const width = Math.min(isEach ? WHOLE_WIDTH : Infinity, (WIDTH - 8) / steps.length);
  const name = (n) => isEach ? format(low + n) : `${format(edges[n])} to ${format(edges[n + 1])}`;
  const words = `median ${format(median)} · p90 ${format(p90)} · max ${format(high)}`;
  const axis = isEach && width >= 16
    ? steps.map((_, n) => svg("text", { x: 4 + n * width + width / 2 - 1, y: LOW + 14, "text-anchor": "middle" }, format(low + n)))
    : [svg("text", { x: 4, y: LOW + 14 }, format(edges[0])), svg("text", { x: 4 + steps.length * width, y: LOW + 14, "text-anchor": "end" }, format(high))];
  const middle = Math.max(WIDTH / 2, isEach ? steps.length * width + 30 : 0);
  return chart(title, words + unknown, svg("svg",
    { viewBox: `0 0 ${WIDTH} ${LOW + 20}`, role: "img", "aria-label": `${title}: ${words}${unknown}` },
    svg("line", { class: "axis", x1: 4, x2: WIDTH - 4, y1: LOW + 0.5, y2: LOW + 0.5 }),
    stackedBars(steps, width, (n) => `${name(n)}: ${stepWords(steps[n])}`), axis,
    svg("text", { class: "soft", x: Math.min(middle, WIDTH - 60), y: LOW + 14, "text-anchor": "middle" }, grows ? `${unit}, in growing steps` : unit)));
}

function timeline(times) {
  if (!times || times.first === times.last) return null;
  const { first, last, heights } = times;
  const span = last - first;
  const all = heights.reduce((total, n) => total + n, 0);
  const rate = all > 1 ? `${short(Math.round((all / span) * 600) / 10)} a minute` : "";
  const words = `${rate} over ${seconds(span)}`;
  const steps = stepsOf(times);
  return chart("Ended over time", words, svg("svg",
    { viewBox: `0 0 ${WIDTH} ${LOW + 20}`, role: "img", "aria-label": `Ended over time: ${words}` },
    svg("line", { class: "axis", x1: 4, x2: WIDTH - 4, y1: LOW + 0.5, y2: LOW + 0.5 }),
    stackedBars(steps, (WIDTH - 8) / steps.length, (n) => `${moment(first + (span * n) / heights.length)}: ${stepWords(steps[n])}`),
    svg("text", { x: 4, y: LOW + 14 }, moment(first)),
    svg("text", { x: WIDTH - 4, y: LOW + 14, "text-anchor": "end" }, moment(first + span).slice(11))));
}

function toolItems(tools, pick, word = "failed") {
  return tools.map(([name, n, failed]) => ({
    name,
    parts: [["plain-bar", n - failed], ["bad", failed]],
    words: failed ? `${short(n)}, ${short(failed)} ${word}` : short(n),
    pick: () => pick(name),
  }));
}

function statusKind(status) {
  if (["completed", "sound"].includes(status)) return "good";
  return meta.is_audit || ["failed", "errors"].includes(status) ? "bad" : "fair";
}

function reasoningItems({ sums, reasoning: { all, some, none } }) {
  const rows = all + some + none;
  const item = (name, n, of, kind) => ({
    name,
    parts: [[kind, of ? n / of : 0], ["rest", of ? 1 - n / of : 0]],
    words: percent(n, of),
  });
  return [
    item("turns with it", sums.reasoned, sums.turns, "good"),
    item("in all turns", all, rows, "good"),
    item("in some turns", some, rows, "fair"),
    item("in no turn", none, rows, "bad"),
  ];
}

function checkItems(found, pick) {
  const item = (name, kind, n) => (
    { name, parts: [[kind, n]], words: `${short(n)}, ${percent(n, found.count)}`, pick: () => pick(name) });
  return [
    item(verdictNames()[0], "good", found.passed),
    item(verdictNames()[1], "bad", found.not_passed),
    !meta.is_steps && item("not checked or scored", "rest", found.unjudged),
  ].filter((one) => one && one.parts[0][1]);
}

const rowWord = () => meta.is_audit ? "task" : meta.is_steps ? "step" : "conversation";

function statusItems({ statuses, count: all }, pick) {
  return statuses.map(([name, n]) => ({
    name, parts: [[statusKind(name), n]], words: `${short(n)}, ${percent(n, all)}`, pick: () => pick({ status: name }),
  }));
}

// The charts of what `summarize` found; `pick` takes {status}, {tool} or {flag} to filter by.
function drawCharts(found, pick) {
  if (!found.count) {
    $("charts").replaceChildren(h("p", { class: "soft" }, "Nothing to draw."));
    return;
  }
  if (meta.is_audit) {
    $("charts").replaceChildren(...auditCharts(found, pick));
    return;
  }
  const { sums, failures, histograms } = found;
  const legend = meta.is_checked && h("p", { class: "legend" }, h("span", { class: "good" }, verdictNames()[0]), h("span", { class: "bad" }, meta.is_steps ? verdictNames()[1] : "did not pass"), h("span", { class: "plain-bar" }, "not judged"));
  const drawn = [
    bars("Statuses", plural(found.count, rowWord()), statusItems(found, pick)),
    meta.is_checked && bars(meta.is_steps ? "Verdicts" : "Checks", meta.is_steps ? plural(found.count, "step") : meanReward(found), checkItems(found, (flag) => pick({ flag }))),
    meta.is_checked && has("reward") && histogram("Rewards", "reward", histograms.reward, digits),
    timeline(found.over_time),
    bars("Tools", `${count(sums.calls)} calls, ${percent(sums.failed_calls, sums.calls)} failed`,
      toolItems(found.tools, (tool) => pick({ tool }))),
    bars("Failed calls by kind", "calls", failures.map(([name, n]) => ({ name, parts: [["bad", n]], words: short(n) }))),
    sums.reasoned ? bars("Reasoning", `${count(sums.reasoned)} of ${count(sums.turns)} turns`, reasoningItems(found)) : null,
    histogram("Turns", "turns", histograms.turns, count, { whole: true }),
    histogram("Time at work", "time of each", histograms.duration_s, seconds),
    histogram("Tokens in", "tokens of each", histograms.input_tokens, (n) => short(Math.round(n))),
    histogram("Tokens out", "tokens of each", histograms.output_tokens, (n) => short(Math.round(n))),
    histogram("Cost", "dollars of each", histograms.cost_usd, dollars),
  ];
  $("charts").replaceChildren(...[legend, ...drawn].filter(Boolean));
}

function meanReward({ sums, known }) {
  return known.reward ? `mean reward ${digits(sums.reward / known.reward)}` : "no reward";
}

// Of the whole run, whatever the filters say: groups are only whole there.
function rewardTiles(tile) {
  if (!meta.rewards || meta.is_steps) return [];
  const { by_name: byName, pass_at: passAt, stopped_at: stoppedAt, models = [] } = meta.rewards;
  const spread = (of) => `std ${digits(of.std)}${of.groups ? `; within ${plural(of.groups, "prompt")} ${digits(of.mean_group_std)}, ${count(of.equal_groups)} all equal` : ""}`;
  const shown = Object.entries(byName).filter(([name, of]) => name !== "reward" || of.groups);
  const named = shown.map(([name, of]) => tile(`Mean ${name}`, digits(of.mean), `${count(of.records)} in all, ${spread(of)}`));
  const ks = Object.entries(passAt);
  const last = ks.pop();
  const corrected = stoppedAt ? `; corrected: samples stopped at ${stoppedAt[0]} passed` : "";
  const perDollar = (of) => (of.passed_per_dollar == null ? "" : `, ${digits(of.passed_per_dollar)} per $`) + (of.cost_usd && of.cost_unknown ? `, unknown for ${count(of.cost_unknown)}` : "");
  const byModel = models.map((of) => tile(of.model, of.judged ? percent(of.passed, of.judged) : "-",
    `passed ${count(of.passed)} of ${count(of.judged)} judged, ${of.cost_usd || !of.cost_unknown ? dollars(of.cost_usd) : "cost unknown"}${perDollar(of)}`));
  return [...named, last && tile(`pass@${last[0]}`, `${last[1]}%`, ks.map(([k, value]) => `pass@${k} ${value}%`).join(", ") + corrected), ...byModel];
}

function spentTile(tile, name, { usd, unknown }, words) {
  return tile(name, usd || !unknown ? dollars(usd) : "?", unknown ? `${words}, unknown for ${count(unknown)}` : words);
}

function drawTiles(found) {
  const { count: all, sums, known, completed, passed } = found;
  const unknown = (key) => (known[key] < all ? `, unknown for ${count(all - known[key])}` : "");
  const tile = (name, value, words) => h("div", {}, h("dt", {}, name), h("dd", {}, value, h("small", {}, words)));
  if (meta.is_audit) {
    drawAuditTiles(found, tile);
    return;
  }
  const cached = !known.cached_tokens ? "cached: unknown"
    : `${known.cached_tokens < known.input_tokens ? "at least " : ""}${percent(sums.cached_tokens, sums.input_tokens)} cached`;
  const judges = meta.judges && (meta.judges.usd || meta.judges.unknown);
  $("tiles").replaceChildren(...[
    tile(`${firstUpper(rowWord())}s`, count(all), meta.tasks == null ? "" : `of ${plural(meta.tasks, meta.is_steps ? "step" : "task")}`),
    tile("Completed", percent(completed, all), count(completed)),
    meta.is_checked && !meta.is_steps && tile("Passed", percent(passed, known.passed), `${count(passed)} of ${count(known.passed)} checked or scored, ${meanReward(found)}`),
    ...rewardTiles(tile),
    has("turns") && tile("Turns", short(sums.turns), all ? `${(sums.turns / all).toFixed(1)} each` : ""),
    has("calls") && tile("Tool calls", short(sums.calls), `${percent(sums.failed_calls, sums.calls)} failed`),
    has("input_tokens") && tile("Tokens in", short(sums.input_tokens), `${cached}${unknown("input_tokens")}`),
    has("output_tokens") && tile("Tokens out", short(sums.output_tokens), unknown("output_tokens").slice(2)),
    has("cost_usd") && tile("Cost", known.cost_usd || !all ? dollars(sums.cost_usd) : "?", unknown("cost_usd").slice(2)),
    meta.spent && (meta.spent.usd || has("cost_usd")) && spentTile(tile, "Spent", meta.spent, "by the run in all"),
    judges && spentTile(tile, "Judges", meta.judges, "for scores"),
  ].filter(Boolean));
}
