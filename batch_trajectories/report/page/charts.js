// Charts of the rows that the filters leave, drawn as SVG.

const WIDTH = 340;
const NAMES = 116; // the part of a row of bars that is for names
const PER_CHARACTER = 6.4; // at most, in the size of charts; what stands behind a bar decides its room
const MOST_NAME = 17;

function sum(list, key) {
  return list.reduce((total, row) => total + (row[key] ?? 0), 0);
}

function tally(list, pick) {
  const found = new Map();
  for (const row of list) {
    for (const [name, n] of pick(row)) found.set(name, (found.get(name) ?? 0) + n);
  }
  return [...found].sort((a, b) => b[1] - a[1]);
}

function quantile(sorted, q) {
  return sorted[Math.min(sorted.length - 1, Math.floor(q * sorted.length))];
}

function chart(title, words, body) {
  return h("figure", {}, h("figcaption", {}, h("b", {}, title), h("span", {}, words)), body);
}

// Bars of {name, parts: [[class, amount]], words, pick}; what is longest is as wide as there is room.
function bars(title, words, items) {
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
    return svg("g", { transform: `translate(0 ${n * 23})`, ...pick },
      svg("title", {}, `${item.name}: ${item.words}`),
      svg("rect", { class: "hit", width: WIDTH, height: 23 }),
      svg("text", { x: NAMES - 6, y: 16, "text-anchor": "end" }, name),
      parts,
      svg("text", { class: "amount", x: x + 5, y: 16 }, item.words));
  });
  const hidden = items.length - shown.length;
  const text = hidden > 0 ? `${words} · ${hidden} more not drawn` : words;
  const label = `${title}: ${shown.map((item) => `${item.name} ${item.words}`).join(", ")}`;
  return chart(title, text, svg("svg",
    { viewBox: `0 0 ${WIDTH} ${Math.max(1, shown.length) * 23}`, role: "group", "aria-label": label }, drawn));
}

// How often values lie where, in equal steps, or in growing ones where they are far apart.
function histogram(title, values, format, { whole = false } = {}) {
  const known = values.filter((value) => value != null).sort((a, b) => a - b);
  const missing = known.length < values.length ? ` · unknown for ${count(values.length - known.length)}` : "";
  if (!known.length) return chart(title, "unknown", null);
  const low = known[0];
  const high = known[known.length - 1];
  if (low === high) return chart(title, `${format(high)} each${missing}`, null);
  const positive = known.find((value) => value > 0) ?? 1;
  const grows = !whole && high / positive > 60;
  const steps = whole ? Math.max(1, Math.min(24, high - low + 1)) : 24;
  const place = (value) => {
    const part = grows
      ? Math.log(Math.max(value, positive) / positive) / Math.log(high / positive)
      : (value - low) / (high - low + (whole ? 1 : 0) || 1);
    return Math.min(steps - 1, Math.floor(part * steps));
  };
  const edge = (n) =>
    grows ? positive * (high / positive) ** (n / steps) : low + ((high - low + (whole ? 1 : 0)) * n) / steps;
  const heights = new Array(steps).fill(0);
  for (const value of known) heights[place(value)] += 1;
  const tallest = Math.max(...heights);
  const width = (WIDTH - 8) / steps;
  const drawn = heights.map((n, step) => {
    const height = n ? Math.max(1.5, (n / tallest) * 84) : 0;
    return svg("rect", { class: "good", x: 4 + step * width, y: 90 - height, width: Math.max(1, width - 1.5), height },
      svg("title", {}, `${format(edge(step))} to ${format(edge(step + 1))}: ${count(n)}`));
  });
  const words = `median ${format(quantile(known, 0.5))} · p90 ${format(quantile(known, 0.9))} · max ${format(high)}`;
  return chart(title, words + missing, svg("svg",
    { viewBox: `0 0 ${WIDTH} 110`, role: "img", "aria-label": `${title}: ${words}${missing}` },
    svg("line", { class: "axis", x1: 4, x2: WIDTH - 4, y1: 90.5, y2: 90.5 }),
    drawn,
    svg("text", { x: 4, y: 105 }, format(grows ? positive : low)),
    grows && svg("text", { class: "soft", x: WIDTH / 2, y: 105, "text-anchor": "middle" }, "growing steps"),
    svg("text", { x: WIDTH - 4, y: 105, "text-anchor": "end" }, format(high))));
}

function timeline(list) {
  const times = list.map((row) => row.finished_at).filter((at) => at != null).sort((a, b) => a - b);
  const first = times[0];
  const span = times[times.length - 1] - first || 1;
  const steps = 48;
  const heights = new Array(steps).fill(0);
  for (const at of times) heights[Math.min(steps - 1, Math.floor(((at - first) / span) * steps))] += 1;
  const tallest = Math.max(1, ...heights);
  const width = (WIDTH - 8) / steps;
  const rate = times.length > 1 ? `${short(Math.round((times.length / span) * 600) / 10)} a minute` : "";
  const words = `${rate} over ${seconds(span)}`;
  return chart("Ended over time", words, svg("svg",
    { viewBox: `0 0 ${WIDTH} 110`, role: "img", "aria-label": `Ended over time: ${words}` },
    svg("line", { class: "axis", x1: 4, x2: WIDTH - 4, y1: 90.5, y2: 90.5 }),
    heights.map((n, step) => svg("rect",
      { class: "good", x: 4 + step * width, y: 90 - (n / tallest) * 84, width: width - 1, height: (n / tallest) * 84 },
      svg("title", {}, `${moment(first + (span * step) / steps)}: ${count(n)}`))),
    svg("text", { x: 4, y: 105 }, moment(first)),
    svg("text", { x: WIDTH - 4, y: 105, "text-anchor": "end" }, moment(first + span).slice(11))));
}

function toolItems(list, pick, word = "failed") {
  const calls = tally(list, (row) => Object.entries(row.tools).map(([name, [n]]) => [name, n]));
  const failed = new Map(tally(list, (row) => Object.entries(row.tools).map(([name, [, n]]) => [name, n])));
  return calls.map(([name, n]) => ({
    name,
    parts: [["good", n - failed.get(name)], ["bad", failed.get(name)]],
    words: failed.get(name) ? `${short(n)}, ${short(failed.get(name))} ${word}` : short(n),
    pick: () => pick(name),
  }));
}

function statusKind(status) {
  if (["completed", "sound"].includes(status)) return "good";
  return meta.is_audit || ["failed", "errors"].includes(status) ? "bad" : "fair";
}

function reasoningItems(list) {
  const turns = sum(list, "turns");
  const reasoned = sum(list, "reasoned");
  const some = list.filter((row) => row.turns);
  const all = some.filter((row) => row.reasoned === row.turns).length;
  const none = some.filter((row) => !row.reasoned).length;
  const item = (name, n, of, kind) => ({
    name,
    parts: [[kind, of ? n / of : 0], ["rest", of ? 1 - n / of : 0]],
    words: percent(n, of),
  });
  return [
    item("turns with it", reasoned, turns, "good"),
    item("all turns of a row", all, some.length, "good"),
    item("some turns", some.length - all - none, some.length, "fair"),
    item("no turn", none, some.length, "bad"),
  ];
}

function checkItems(list, pick) {
  const item = (name, kind, of, flag) => {
    const n = list.filter(of).length;
    return { name, parts: [[kind, n]], words: `${short(n)}, ${percent(n, list.length)}`, pick: () => pick(flag) };
  };
  return [
    item("passed", "good", (row) => row.passed === true, "passed"),
    item("not passed", "bad", (row) => row.passed === false, "not passed"),
    item("not checked or scored", "rest", (row) => row.reward == null, "not checked or scored"),
  ].filter(({ parts: [[, n]] }) => n);
}

// The charts of `list`; `pick` takes {status}, {tool} or {flag} to filter by.
function drawCharts(list, pick) {
  if (!list.length) {
    $("charts").replaceChildren(h("p", { class: "soft" }, "Nothing to draw."));
    return;
  }
  if (meta.is_audit) {
    $("charts").replaceChildren(...auditCharts(list, pick));
    return;
  }
  const values = (key) => list.map((row) => row[key]);
  const failures = tally(list, (row) => Object.entries(row.failures));
  $("charts").replaceChildren(...[
    bars("Statuses", list.length === 1 ? "1 trajectory" : `${count(list.length)} trajectories`,
      tally(list, (row) => [[row.status, 1]]).map(([name, n]) => ({
        name, parts: [[statusKind(name), n]], words: `${short(n)}, ${percent(n, list.length)}`, pick: () => pick({ status: name }),
      }))),
    isChecked && bars("Checks", meanReward(list), checkItems(list, (flag) => pick({ flag }))),
    isChecked && histogram("Rewards", values("reward"), (n) => String(Number(n.toPrecision(3)))),
    timeline(list),
    bars("Tools", `${count(sum(list, "calls"))} calls, ${percent(sum(list, "failed_calls"), sum(list, "calls"))} failed`,
      toolItems(list, (tool) => pick({ tool }))),
    bars("Failed calls by kind", failures.length ? "" : "none",
      failures.map(([name, n]) => ({ name, parts: [["bad", n]], words: short(n) }))),
    bars("Reasoning", `${count(sum(list, "reasoned"))} of ${count(sum(list, "turns"))} turns`, reasoningItems(list)),
    histogram("Turns", values("turns"), count, { whole: true }),
    histogram("Time at work", values("duration_s"), seconds),
    histogram("Tokens in", values("input_tokens"), (n) => short(Math.round(n))),
    histogram("Tokens out", values("output_tokens"), (n) => short(Math.round(n))),
    histogram("Cost", values("cost_usd"), dollars),
  ].filter(Boolean));
}

function meanReward(list) {
  const known = list.filter((row) => row.reward != null).length;
  return known ? `mean reward ${Number((sum(list, "reward") / known).toPrecision(3))}` : "no reward";
}

// Of the whole run, whatever the filters say: groups are only whole there.
function rewardTiles(tile) {
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

function drawTiles(list) {
  const known = (key) => list.filter((row) => row[key] != null).length;
  const completed = list.filter((row) => row.status === "completed").length;
  const unknown = (key) => (known(key) < list.length ? `, unknown for ${count(list.length - known(key))}` : "");
  const tile = (name, value, words) => h("div", {}, h("dt", {}, name), h("dd", {}, value, h("small", {}, words)));
  if (meta.is_audit) {
    drawAuditTiles(list, tile);
    return;
  }
  const tokens = sum(list, "input_tokens");
  const passed = list.filter((row) => row.passed === true).length;
  const judged = list.filter((row) => row.passed != null).length;
  $("tiles").replaceChildren(
    tile("Trajectories", count(list.length), `of ${plural(meta.tasks, "task")}`),
    tile("Completed", percent(completed, list.length), count(completed)),
    ...(isChecked ? [tile("Passed", percent(passed, judged), `${count(passed)} of ${count(judged)} checked or scored, ${meanReward(list)}`)] : []),
    ...rewardTiles(tile).filter(Boolean),
    tile("Turns", short(sum(list, "turns")), list.length ? `${(sum(list, "turns") / list.length).toFixed(1)} each` : ""),
    tile("Tool calls", short(sum(list, "calls")), `${percent(sum(list, "failed_calls"), sum(list, "calls"))} failed`),
    tile("Tokens in", short(tokens), `${percent(sum(list, "cached_tokens"), tokens)} cached${unknown("input_tokens")}`),
    tile("Tokens out", short(sum(list, "output_tokens")), unknown("output_tokens").slice(2)),
    tile("Cost", known("cost_usd") || !list.length ? dollars(sum(list, "cost_usd")) : "?", unknown("cost_usd").slice(2)),
    spentTile(tile, "Spent", meta.spent, "by the run in all"),
    ...(meta.judges.usd || meta.judges.unknown ? [spentTile(tile, "Judges", meta.judges, "for scores")] : []),
  );
}
