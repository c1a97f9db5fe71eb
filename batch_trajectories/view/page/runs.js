// All runs: what they are at, and which to compare.

const TREND_RUNS = 24; // at most, in the chart of a dataset

const chosen = new Set();

const unknownYet = () => h("span", { class: "soft", title: "not known yet" }, "–");

// The cells of a run: [name, class, content].
const RUN_CELLS = [
  ["Model", "model", (run) => nameOfModel(run.model)],
  ["Rows", "number", (run) => [run.rows == null ? unknownYet() : count(run.rows), run.samples > 1 && h("small", {}, `${count(run.samples)} samples each`)]],
  ["State", "", (run) => [stateMark(run), run.now ? progressOf(run) : stageOf(run), problemsOfRun(run)]],
  ["Passed", "number", (run) => run.pass_rate == null ? (run.done ? h("span", { class: "soft" }, "not judged") : unknownYet())
    : [h("span", { class: run.passed ? false : "failed" }, percent(run.pass_rate, 1)), h("small", {}, `${count(run.passed)} of ${count(run.checked)}`)]],
  ["Training rows", "number", (run) => run.training_rows == null || isAtWork(run) ? unknownYet() : h("span", { class: run.training_rows ? false : "failed" }, count(run.training_rows))],
  ["Cost", "number", (run) => run.cost_usd == null || (!run.cost_usd && run.cost_unknown) ? unknownYet()
    : [dollars(run.cost_usd), run.cost_unknown ? h("small", {}, "and some unknown") : run.cost_usd && run.passed ? h("small", {}, `${dollars(run.cost_usd / run.passed)} per passed one`) : null]],
  ["Age", "number", (run) => ageOf(run)],
];
const AUDIT_CELLS = [
  ["Dataset", "", (run) => run.dataset ?? ""],
  ["Tasks", "number", (run) => run.rows == null ? unknownYet() : count(run.rows)],
  ["Sound", "number", (run) => run.verdicts == null ? unknownYet() : [count(run.verdicts.sound ?? 0), h("small", {}, percent(run.verdicts.sound ?? 0, run.rows))]],
  ["State", "", (run) => stateMark(run)],
  ["Age", "number", (run) => ageOf(run)],
];
const cellsOf = (run) => (run.is_audit ? AUDIT_CELLS : RUN_CELLS);

const STATE_KINDS = { running: "good", paused: "fair", "not running": "rest", unreadable: "bad" };

// One model, models by weight, or a cascade from small to large.
const nameOfModel = (model) => model == null ? "" : typeof model === "string" ? model : Array.isArray(model) ? model.join(" → ") : Object.keys(model).join(", ");

// Whole units: "4 min", "3 h", "12 d".
function ageOf({ begun }) {
  if (begun == null) return unknownYet();
  const s = Math.max(0, Date.now() / 1000 - begun);
  const [unit, name] = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]].find(([of]) => s >= 2 * of || of === 1);
  return h("span", { title: `begun ${moment(begun)}` }, `${count(Math.floor(s / unit))} ${name}`);
}

const isAtWork = (run) => ["running", "paused"].includes(run.state);
const hasEnded = (run) => run.tasks > 0 && run.done + run.failed >= run.tasks;
const isDone = (run) => run.state === "not running" && hasEnded(run);

const hasNoRow = (run) => run.training_rows === 0 && run.done > 0;

function stateMark(run) {
  if (run.is_audit) return h("span", { class: `status ${STATE_KINDS[run.state] ?? "rest"}` }, run.state === "not running" ? "ended" : run.state);
  const words = isDone(run) ? "complete" : run.state === "not running" && run.done != null ? `stopped at ${count(run.done)} of ${count(run.tasks)}` : run.state;
  const isBad = run.failed > 0 || (isDone(run) && ((run.checked > 0 && !run.passed) || hasNoRow(run)));
  return [h("span", { class: `status ${isBad ? "bad" : isDone(run) ? "good" : STATE_KINDS[run.state] ?? "rest"}` }, words),
    run.error && h("small", { class: "failed" }, " ", run.error)];
}

// Before its first conversations and after the last one, a run says nothing of its progress.
function stageOf(run) {
  return isAtWork(run) ? h("small", {}, hasEnded(run) ? "all ended, writing its files" : "starting") : null;
}

function progressOf({ tasks, done, failed, now }) {
  if (!tasks) return "";
  const words = `${count(done)} of ${count(tasks)}${failed ? `, ${count(failed)} failed` : ""}`;
  const rate = now?.tasks_per_min == null ? "" : `, ${digits(now.tasks_per_min)} a minute${now.left_s == null ? "" : `, ${seconds(now.left_s)} left`}`;
  return [" ", h("progress", { max: tasks, value: Math.min(tasks, done), "aria-label": words }), h("small", {}, words + rate)];
}

// What is wrong with a run, in words; nothing while its health is not known.
function problemsOfRun(run) {
  const words = [];
  if (!run.now && run.failed) words.push(`${count(run.failed)} failed`);
  if (!run.now && run.checked >= 10 && !run.passed) words.push("none passed");
  if (isDone(run) && hasNoRow(run)) words.push("no training row");
  words.push(...(run.health ?? []).map(shortProblem));
  if (!words.length) return null;
  const shown = words.length > 2 ? [...words.slice(0, 2), `${count(words.length - 2)} more`] : words;
  return h("span", { class: "problems", title: visible(words.join("\n")) }, shown.join(" · "));
}

const rowOfRun = (key) => [...$("runs-rows").children, ...$("audits-rows").children].find((row) => row.dataset.key === key);

const placesOfRuns = () => new Set([...runs.values()].map((run) => run.place)).size;

function runRow(run) {
  const box = h("input", { type: "checkbox", "aria-label": `compare ${run.name}`, change: (event) => choose(run.key, event.target.checked) });
  box.checked = chosen.has(run.key);
  return h("tr", { "data-key": run.key },
    h("td", { class: "check" }, box),
    h("th", { scope: "row" }, h("a", { href: keyLink(run.key) }, run.name), run.is_mirror || placesOfRuns() > 1 ? h("small", { class: "place" }, run.place, run.is_mirror ? " (mirror)" : "") : null),
    cellsOf(run).map(([name, kind, content]) => h("td", { "data-name": name, class: kind }, content(run))));
}

// What has changed of a run, in its place: the link and the box keep the focus.
function showRun(run) {
  const row = rowOfRun(run.key);
  if (!row) return drawRuns();
  const cells = [...row.children].slice(2);
  cellsOf(run).forEach(([, , content], n) => fill((cells[n].replaceChildren(), cells[n]), {}, [content(run)]));
  return undefined;
}

function drawRuns() {
  const list = [...runs.values()];
  const working = list.filter(isAtWork);
  $("runs-words").textContent = `${plural(list.length, "run")}${working.length ? `, ${count(working.length)} at work` : ""}`;
  const audits = list.filter((run) => run.is_audit);
  $("runs-rows").replaceChildren(...list.filter((run) => !run.is_audit).map(runRow));
  drawTrends(list.filter((run) => !run.is_audit));
  $("audits").hidden = !audits.length;
  $("audits-rows").replaceChildren(...audits.map(runRow));
  if (!list.length) $("runs-rows").append(h("tr", {}, h("td", { colspan: 9, class: "soft" }, "There is no run here yet.")));
  showChosen();
}

// Of each dataset with several judged runs: what share passed, run by run, and what a passed one cost.
function drawTrends(list) {
  const judged = list.filter((run) => run.pass_rate != null && run.begun != null).sort((a, b) => a.begun - b.begun);
  const groups = [...Map.groupBy(judged, (run) => `${run.dataset} ${run.rows}`)].filter(([, of]) => of.length > 1);
  const trend = ([, all]) => {
    const of = all.slice(-TREND_RUNS);
    const width = Math.min(36, (WIDTH - 8) / of.length);
    const cost = (run) => run.cost_usd && run.passed ? dollars(run.cost_usd / run.passed) : null;
    const words = (run) => `${run.name}: ${percent(run.pass_rate, 1)} passed${cost(run) ? `, ${cost(run)} per passed one` : ""}`;
    const [first, last] = [of[0], of[of.length - 1]];
    const change = `${percent(first.pass_rate, 1)} → ${percent(last.pass_rate, 1)} passed`;
    const perPass = cost(first) && cost(last) ? `, ${cost(first)} → ${cost(last)} per passed one` : "";
    const bar = (run, n) => [svg("rect", { class: "rest", x: 4 + n * width, y: 4, width: width - 3, height: 60 }, svg("title", {}, words(run))),
      svg("rect", { class: "good", x: 4 + n * width, y: 64 - 60 * run.pass_rate, width: width - 3, height: 60 * run.pass_rate }, svg("title", {}, words(run)))];
    return h("figure", {}, h("figcaption", {}, h("b", {}, first.dataset), h("span", {}, `${plural(of.length, "run")}, the latest at the right: ${change}${perPass}`)),
      svg("svg", { viewBox: `0 0 ${WIDTH} 68`, role: "img", "aria-label": of.map(words).join("; ") }, of.map(bar)));
  };
  $("trends").hidden = !groups.length;
  $("trends").replaceChildren(...(groups.length ? [h("h2", {}, "Runs of one dataset"), h("div", { class: "trends" }, groups.map(trend))] : []));
}

function startRuns() {
  $("compare-runs").addEventListener("click", compareChosen);
}

function choose(key, isChosen) {
  if (isChosen) chosen.add(key);
  else chosen.delete(key);
  showChosen();
}

function showChosen() {
  $("compare-runs").disabled = chosen.size < 2;
  $("chosen-words").textContent = chosen.size ? `${count(chosen.size)} chosen` : "choose two or more";
}

function compareChosen() {
  if (chosen.size > 1) location.hash = `#=compare/${[...chosen].map(encodeURIComponent).join("/")}`;
}

function stepRun(by) {
  const links = [...$("runs").querySelectorAll("tbody th a")];
  const now = links.findIndex((link) => link.closest("tr").contains(document.activeElement));
  links[now < 0 ? 0 : Math.max(0, Math.min(links.length - 1, now + by))]?.focus();
}

function chooseRun() {
  document.activeElement.closest?.("tr[data-key]")?.querySelector("input")?.click();
}
