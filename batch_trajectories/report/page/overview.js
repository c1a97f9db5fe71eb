// The top of a run: one sentence, five numbers, what went wrong, and the tabs below.

const TABS = ["conversations", "charts", "details"];
let tab = "conversations";

// What a run lacks, by the name of a health check: the rows that it is about.
const ROWS_OF_CHECKS = {
  unfinished: "not completed", cut_turns: "", invalid_calls: "failed calls", interrupted_calls: "failed calls",
  failing_tools: "failed calls", cache_misses: "a cache miss", leak_suspected: "a suspected leak",
  failed_checks: "check without result", instant_passes: "passed",
};
const PROBLEMS_SHOWN = 3;

// What health checks find, to be put after the count where there is little room.
const SHORT_PROBLEMS = {
  unfinished: "not completed", no_tokens: "without token counts", hollow_turns: "empty turns", cut_turns: "turns cut at the token limit",
  repeated_calls: "repeat one call", invalid_calls: "calls with invalid arguments", interrupted_calls: "interrupted calls",
  failing_tools: "tools always fail", failing_prompts: "prompts always fail", cache_misses: "turns missed the prompt cache",
  shrinking_inputs: "requests were cut",
  leak_suspected: "look for the solution", failed_checks: "checks without result", failed_scores: "scores failed",
  instant_passes: "instant passes",
  constant_rewards: "values with one reward",
};

const shortProblem = ({ name, problem, found, of }) => `${count(found)} of ${count(of)} ${SHORT_PROBLEMS[name] ?? problem}`;

const noneOr = (n, word) => (n ? count(n) : "none") + (word ? ` ${word}` : "");

// "120 conversations, 49 passed, 27 training rows".
function sentenceOf({ words = null, ended, tasks, isRunning, passed, judged, completed, trainingRows, sound }) {
  if (words) return words;
  if (meta.is_audit) return `${plural(ended, "task")} audited, ${noneOr(sound, "sound")}`;
  if (!ended) return isRunning ? `None of ${plural(tasks, "conversation")} has ended yet` : "No conversation has ended";
  const all = isRunning && tasks > ended ? `${count(ended)} of ${plural(tasks, "conversation")} so far` : plural(ended, "conversation");
  const verdict = judged ? noneOr(passed, "passed") : completed == null ? null : `${noneOr(completed, "completed")}`;
  const learnt = trainingRows == null ? null : trainingRows === 0 ? "no training row" : plural(trainingRows, "training row");
  return [all, verdict, learnt].filter(Boolean).join(", ");
}

// The five numbers of a run, as [name, value, words]; an audit has fewer.
function numbersOf({ steps, ended, done, failed, tasks, isRunning, passed, judged, completed, trainingRows, costUsd, costUnknown, leftS, tookS, sound }) {
  if (meta.is_audit) return [["Tasks", count(ended), ""], ["Sound", count(sound), percent(sound, ended)], ["With a defect", count(ended - sound), percent(ended - sound, ended)]];
  if (steps) return numbersOfSteps(steps, { tookS });
  const progress = ["Done", count(done), tasks == null ? "" : `of ${count(tasks)}${failed ? `, ${count(failed)} failed` : ""}`];
  const verdict = judged ? ["Passed", percent(passed, judged), `${count(passed)} of ${count(judged)}`]
    : ["Completed", completed == null ? "–" : percent(completed, ended), completed == null ? "" : count(completed)];
  const rows = ["Training rows", trainingRows == null ? "–" : count(trainingRows), trainingRows == null ? (isRunning ? "written at the end" : "not written yet") : ended ? `${percent(trainingRows, ended)} of all` : ""];
  const cost = ["Cost", costUsd == null || (!costUsd && costUnknown) ? "unknown" : dollars(costUsd),
    costUsd && costUnknown ? `and unknown for ${count(costUnknown)}` : costUsd && passed ? `${dollars(costUsd / passed)} per passed one` : ""];
  const time = isRunning ? ["Time left", leftS == null ? "–" : seconds(leftS), leftS == null ? "not known yet" : ""]
    : ["Time", tookS == null ? "–" : seconds(tookS), tookS == null ? "" : "from start to end"];
  return [progress, verdict, rows, cost, time];
}

// Of an audit whose rows are steps.
function numbersOfSteps({ done, failed, all, tasks, verdicts, against }, { tookS }) {
  return [
    ["Tasks", count(tasks), ""],
    ["Sound", verdicts ? count(verdicts.sound ?? 0) : "–", verdicts ? percent(verdicts.sound ?? 0, tasks) : "said at the end"],
    ["Steps", count(done + failed), `of ${count(all)}${failed ? `, ${count(failed)} without a result` : ""}`],
    ["Against their task", against == null ? "–" : count(against), against == null ? "" : `${percent(against, done + failed)} of the steps`],
    ["Time", tookS == null ? "–" : seconds(tookS), tookS == null ? "" : "from start to end"],
  ];
}

// What went wrong, the worst first: {words, reason, pick: filters, examples: ids}.
function problemsOf({ steps, ended, failed, passed, judged, trainingRows, isRunning, statuses, unreadable }) {
  const found = [];
  if (unreadable) {
    found.push({ words: `${plural(unreadable, "record")} cannot be read`, reason: `\`verify ${meta.run_name}\` names ${unreadable === 1 ? "it" : "them"}, and says what to do` });
  }
  if (meta.is_audit) return verdictLines(statuses);
  if (steps) return [...found, ...verdictLines(Object.entries(steps.verdicts ?? {}), `\`report ${meta.run_name}\` shows each with its evidence`, { flag: "against its task" })];
  const [error] = meta.errors;
  if (failed) {
    found.push({
      words: failed === ended ? `All ${plural(failed, "conversation")} failed` : `${plural(failed, "conversation")} failed`,
      reason: error && `${plural(error.count, "attempt")}: ${error.class}: ${error.message}`, pick: { status: "failed" }, part: error && "errors",
    });
  }
  if (judged >= 10 && !passed) {
    const [status, n] = (statuses ?? []).find(([name]) => name !== "failed") ?? [];
    found.push({
      words: `None of ${plural(judged, "judged conversation")} passed`,
      reason: status && `${count(n)} ended as ${status}`, pick: { flag: "not passed" },
    });
  }
  for (const { sign, text } of meta.signs ?? []) {
    if (sign === "no_call") found.push({ words: firstUpper(text), pick: { flag: "no tool call" } });
    if (sign === "same_ending") found.push({ words: firstUpper(text), pick: { flag: "not completed" } });
  }
  if (trainingRows === 0 && ended && !isRunning) {
    const [reason, n] = Object.entries(lostRows())[0] ?? [];
    found.push({ words: "The training file has no row", reason: reason && `${count(n)} left out: ${reason}`, pick: pickOfLost(reason) });
  }
  for (const one of meta.health) {
    const flag = ROWS_OF_CHECKS[one.name];
    found.push({ words: `${count(one.found)} of ${count(one.of)} ${one.problem}`, brief: shortProblem(one), name: one.name, examples: one.examples, pick: flag ? { flag } : null });
  }
  return found;
}

// The verdicts of an audit that are against its tasks, the most frequent first.
function verdictLines(verdicts, more, pick = null) {
  const against = verdicts.filter(([name]) => name !== "sound").sort((a, b) => b[1] - a[1]);
  if (!against.length) return [];
  const all = against.reduce((total, [, n]) => total + n, 0);
  return [{ words: `${plural(all, "task")} with a defect`, reason: [against.map(([name, n]) => `${count(n)} ${name}`).join(", "), more].filter(Boolean).join("; "), pick }];
}

const firstUpper = (text) => text.charAt(0).toUpperCase() + text.slice(1);

// Why conversations are in no row of the training file, by reason.
function lostRows() {
  return meta.funnel?.exports[0]?.lost ?? {};
}

function pickOfLost(reason) {
  const flag = !reason ? "" : ["ended early", "wrong_answer"].includes(reason) ? "a partial row" : reason === "failed" ? "" : "no row: rejected";
  return flag ? { flag } : null;
}

// Whether the filters of the page know what is picked.
const canPick = (pick) => pick && Object.entries(pick).every(([name, value]) => source.choices[name]?.includes(value));

function problemLine({ words, brief, reason, name, pick, part, examples = [] }) {
  const shown = examples.slice(0, 3).flatMap((id, n) => [n ? ", " : " ", source.has(id) ? h("a", { href: source.link(id) }, visible(id)) : visible(id)]);
  const said = brief ? [h("span", { class: "in-full" }, words), h("span", { class: "in-brief" }, brief)] : words;
  return h("li", { "data-name": name, title: name && `${words} (${name})` },
    canPick(pick) ? h("button", { type: "button", class: "as-link", title: `Show these ${rowWord()}s`, click: () => showPicked(pick) }, said)
      : part ? h("button", { type: "button", class: "as-link", title: "Show the failed attempts", click: () => showPart(part) }, said) : h("strong", {}, said),
    reason && h("span", { class: "reason" }, reason),
    examples.length ? h("span", { class: "soft" }, "such as", shown) : null);
}

// A part of the tab "Details", such as the attempts of conversations that have no row.
function showPart(id) {
  showTab("details");
  $(id).open = true;
  $(id).querySelector("summary").focus();
  $(id).scrollIntoView({ block: "nearest" });
}

function showPicked(pick) {
  showTab("conversations");
  setFilters({ ...noFilters(), ...pick });
}

// What is said of a run; called again when it has changed. Problems that come later are one line, so
// that nothing below moves.
function drawOverview() {
  const numbers = source.numbers();
  $("sentence").textContent = sentenceOf(numbers);
  $("numbers").replaceChildren(...numbersOf(numbers).map(([name, value, words]) =>
    h("div", {}, h("dt", {}, name), h("dd", {}, value, h("small", {}, words)))));
  const problems = problemsOf(numbers);
  const isChecking = meta.is_counting && !meta.health.length;
  const place = $("problems");
  const room = place.dataset.drawn ? Math.max(1, place.childElementCount) : PROBLEMS_SHOWN;
  const shown = place.dataset.all ? problems.length : problems.length > room ? Math.max(1, room - 1) : problems.length;
  place.dataset.drawn = "yes";
  place.classList.toggle("bad", problems.length > 0);
  place.replaceChildren(...problems.slice(0, shown).map(problemLine));
  if (problems.length > shown) {
    const last = shown === 1 && room === 1 ? place.lastElementChild : place.appendChild(h("li", {}));
    last.append(" ", h("button", { type: "button", class: "as-link", click: () => {
      place.dataset.all = "yes";
      drawOverview();
      place.querySelector("button, a")?.focus();
    } }, `and ${plural(problems.length - shown, "more problem")}`));
  }
  const lost = Object.entries(lostRows());
  if (!problems.length) place.append(h("li", { class: "soft" }, isChecking ? "looking for problems …" : meta.is_audit || !lost.length ? "no problem found" : lostWords(lost)));
}

const lostWords = (lost) => ["No problem found. Not in the training file: ", ...lost.slice(0, 4).flatMap(([reason, n], at) => {
  const pick = pickOfLost(reason);
  const words = `${count(n)} ${reason}`;
  return [at ? ", " : "", canPick(pick) ? h("button", { type: "button", class: "as-link", click: () => showPicked(pick) }, words) : visible(words)];
})];

// Another run comes: its problems are drawn as those of a new page.
function forgetOverview() {
  delete $("problems").dataset.drawn;
  delete $("problems").dataset.all;
}

function showTab(name) {
  tab = name;
  for (const one of TABS) {
    const button = $(`tab-${one}`);
    button.setAttribute("aria-selected", String(one === name));
    button.tabIndex = one === name ? 0 : -1;
    $(`${one}-panel`).hidden = one !== name;
  }
  $("filters").hidden = name === "details";
  $("columns").hidden = name !== TABS[0];
  keepAddress();
  if (name === "charts") drawSummary();
  if (name === "conversations") drawRows({ force: true });
}

function listenToTabs() {
  for (const name of TABS) $(`tab-${name}`).addEventListener("click", () => showTab(name));
  $("tabs").addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by) return;
    event.preventDefault();
    event.stopPropagation();
    showTab(TABS[(TABS.indexOf(tab) + by + TABS.length) % TABS.length]);
    $(`tab-${tab}`).focus();
  });
}

// What the address keeps of the view, after a question mark: filters, order, columns and tab.
function stateText() {
  const parts = new URLSearchParams();
  for (const [name, value] of Object.entries(filters)) if (value) parts.set(name, value === true ? "yes" : value);
  if (order.key) parts.set("sort", `${order.down ? "-" : ""}${order.key}`);
  if (chosenColumns) parts.set("columns", chosenColumns.join(" "));
  if (tab !== TABS[0]) parts.set("tab", tab);
  const text = parts.toString();
  return text && `?${text}`;
}

function keepAddress() {
  if (meta === null || $("list").hidden) return;
  const [place] = location.hash.split("?");
  if (`${place}${stateText()}` !== location.hash) history.replaceState(null, "", `${place || "#"}${stateText()}`);
}

// Take what an address says; whether rows have to be found again. Names that nobody knows are left out.
function takeState(hash) {
  const at = hash.indexOf("?");
  if (at < 0 || hash.slice(at) === stateText()) return false;
  const parts = new URLSearchParams(hash.slice(at + 1));
  for (const name of Object.keys(filters)) filters[name] = isBox(name) ? parts.get(name) === "yes" : parts.get(name) ?? "";
  const sort = parts.get("sort") ?? "";
  const key = sort.replace(/^-/, "");
  const all = allColumns();
  Object.assign(order, all.some((column) => column.key === key) ? { key, down: sort.startsWith("-") } : { key: null, down: false });
  const names = (parts.get("columns") ?? "").split(" ").filter((name) => all.some((column) => column.key === name));
  chosenColumns = names.length ? names : null;
  chooseColumns();
  drawHeads();
  showFilters();
  showTab(TABS.includes(parts.get("tab")) ? parts.get("tab") : TABS[0]);
  return true;
}
