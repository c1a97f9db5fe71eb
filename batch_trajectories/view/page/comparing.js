// Runs side by side, the first with each other one.

const money = (usd, unknown) => dollars(usd) + (unknown ? ` + ${count(unknown)} unknown` : "");

const SUM_ROWS = [
  ["records", (sums) => count(sums.records)],
  ["passed", ({ checks }) => (checks.pass_rate == null ? "–" : `${count(checks.passed)} of ${count(checks.passed + checks.failed)} (${digits(checks.pass_rate)}%)`)],
  ["mean reward", ({ checks }) => (checks.mean_reward == null ? "–" : digits(checks.mean_reward)), "reward"],
  ["turns", (sums) => count(sums.turns), "turns"],
  ["tool calls", (sums) => count(sums.tool_calls), "tool_calls"],
  ["tokens in", (sums) => short(sums.input_tokens), "input_tokens"],
  ["tokens out", (sums) => short(sums.output_tokens), "output_tokens"],
  ["cost", (sums) => money(sums.cost_usd, sums.cost_unknown), "cost_usd"],
  ["spent in all", (sums) => money(sums.spent_usd, sums.spent_unknown)],
];

// Whether a line of sums says something: not where all runs have nothing.
const isSaid = ([name, value], columns) => columns.some(([, of]) => !["0", "$0", "–"].includes(String(value(of))));

const signed = (n) => (n == null ? "" : `${n > 0 ? "+" : ""}${digits(n)}`);
const nameOf = (key) => runs.get(key)?.name ?? key;
const valueText = (value) => (typeof value === "string" ? value : JSON.stringify(value) ?? "not set");

async function drawComparison(keys) {
  const place = $("compare");
  place.replaceChildren(h("h2", { tabindex: -1 }, "Comparison"), h("p", { class: "soft", role: "status" }, "reading the runs …"));
  const asked = location.hash;
  const { comparisons } = await ask(`/api/compare?${new URLSearchParams(keys.map((key) => ["run", key]))}`);
  if (location.hash !== asked) return;
  fill((place.replaceChildren(), place), {}, [
    h("h2", { tabindex: -1 }, "Comparison"), sumsOfRuns(comparisons), comparisons.map(differences),
  ]);
  place.querySelector("h2").focus();
}

function sumsOfRuns(comparisons) {
  const [{ first, runs: [sums] }] = comparisons;
  const columnsOf = [[first, sums, {}], ...comparisons.map((one) => [one.second, one.runs[1], one.paired])];
  const statuses = [...new Set(columnsOf.flatMap(([, of]) => Object.keys(of.statuses)))].sort();
  const verdicts = [...new Set(columnsOf.flatMap(([, of]) => Object.keys(of.labels)))].sort();
  const line = (name, value) => h("tr", {}, h("th", { scope: "row" }, name), columnsOf.map((column) => h("td", { class: "number" }, value(column))));
  const share = (n, all) => `${count(n ?? 0)} (${percent(n ?? 0, all)})`;
  return h("div", { class: "wide part", tabindex: 0, role: "region", "aria-label": "Sums of the runs" }, h("table", { class: "plain sums" },
    h("thead", {}, h("tr", {}, h("td", {}), columnsOf.map(([key]) => h("th", { scope: "col", class: "number" }, h("a", { href: keyLink(key) }, nameOf(key)))))),
    h("tbody", {},
      statuses.map((status) => line(status, ([, of]) => share(of.statuses[status], of.records))),
      SUM_ROWS.filter((row) => isSaid(row, columnsOf)).map(([name, value, paired]) => line(name, ([, of, means]) => [value(of), paired && means[paired] ? h("small", {}, ` ${signed(means[paired])} a task`) : null])),
      verdicts.map((verdict) => line(`decided: ${verdict}`, ([, of]) => count(of.labels[verdict] ?? 0))))));
}

function differences({ first, second, options, same_dataset: isSame, both, only, changed, judged_otherwise: judged, labelled_otherwise: labelled, more = {} }) {
  const to = (key, id) => h("a", { href: `${keyLink(key)}/${encodeURIComponent(id)}` }, nameOf(key));
  const list = (title, items, words, name) => items.length ? h("details", { class: "part", open: items.length <= 20 },
    h("summary", {}, title, " ", h("small", {}, count(items.length + (more[name] ?? 0)))),
    h("div", { class: "wide" }, h("table", { class: "plain" }, h("tbody", {}, items.map((item) => h("tr", {},
      h("th", { scope: "row" }, item.id), h("td", {}, words(item)), h("td", {}, to(first, item.id), " · ", to(second, item.id)))))))) : null;
  const passed = (value) => (value ? "passed" : "not passed");
  return h("section", {},
    h("h3", {}, `${nameOf(first)} and ${nameOf(second)}`),
    h("p", {}, `${plural(both, "task")} with a record in both; ${count(only[0].length + (more.only?.[0] ?? 0))} only in the first, ${count(only[1].length + (more.only?.[1] ?? 0))} only in the second${isSame ? "" : "; the datasets differ"}.`),
    !Object.keys(options).length && !judged.length && !changed.length && !labelled.length ? h("p", {}, "The same options, and no task ended differently.") : null,
    Object.keys(options).length ? h("details", { class: "part", open: true }, h("summary", {}, "Options that differ"),
      h("div", { class: "wide" }, h("table", { class: "plain" }, h("tbody", {}, Object.entries(options).map(([name, [a, b]]) => h("tr", {},
        h("th", { scope: "row" }, name), h("td", {}, valueText(a)), h("td", {}, valueText(b)))))))) : null,
    list("Passed in one only", judged, (item) => `${passed(item.from)} → ${passed(item.to)}`, "judged_otherwise"),
    list("Ended differently", changed, (item) => `${item.from} → ${item.to}`, "changed"),
    list("Decided otherwise", labelled, (item) => `${item.from} → ${item.to}`, "labelled_otherwise"));
}
