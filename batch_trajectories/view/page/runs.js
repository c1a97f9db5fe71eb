// All runs: what they are at, and which to compare.

const chosen = new Set();

const RUN_CELLS = [
  (run) => stateMark(run),
  (run) => progressOf(run),
  (run) => run.now?.tasks_per_min == null ? "" : [`${digits(run.now.tasks_per_min)} a minute`, h("small", {}, run.now.left_s == null ? "" : ` ${seconds(run.now.left_s)} left`)],
  (run) => [dollars(run.cost_usd), run.cost_unknown && h("small", {}, " and unknown")],
  (run) => run.pass_rate == null ? "–" : [percent(run.pass_rate, 1), h("small", {}, ` of ${count(run.checked)}`)],
  (run) => healthOf(run),
  (run) => moment(run.begun).slice(0, 16),
];
const RUN_HEADS = ["State", "Progress", "Rate", "Cost", "Passed", "Health", "Begun"];
const NUMBERS = new Set(["Rate", "Cost", "Passed"]);

const STATE_KINDS = { running: "good", paused: "fair", "not running": "rest", unreadable: "bad" };

function stateMark(run) {
  const isDone = run.state === "not running" && run.tasks && run.done + run.failed >= run.tasks;
  return [h("span", { class: `status ${isDone && !run.failed ? "good" : STATE_KINDS[run.state] ?? "rest"}` }, isDone ? "complete" : run.state),
    run.error && h("small", { class: "failed" }, " ", run.error)];
}

function progressOf({ tasks, done, failed }) {
  if (!tasks) return "";
  const words = `${count(done)} of ${count(tasks)}${failed ? `, ${count(failed)} failed` : ""}`;
  return [h("progress", { max: tasks, value: Math.min(tasks, done), "aria-label": words }), h("small", {}, words)];
}

function healthOf({ health }) {
  if (!health) return h("span", { class: "soft" }, "not known");
  if (!health.length) return "no problem";
  const words = health.map((found) => `${found.name}: ${found.found} of ${found.of}`);
  return h("span", { class: "status fair", title: visible(words.join("\n")) }, health.length === 1 ? health[0].name : plural(health.length, "problem"));
}

const rowOfRun = (key) => [...$("runs-rows").children].find((row) => row.dataset.key === key);

function runRow(run) {
  const box = h("input", { type: "checkbox", "aria-label": `compare ${run.name}`, change: (event) => choose(run.key, event.target.checked) });
  box.checked = chosen.has(run.key);
  return h("tr", { "data-key": run.key },
    h("td", { class: "check" }, box),
    h("th", { scope: "row" }, h("a", { href: keyLink(run.key) }, run.name), h("small", { class: "place" }, run.place, run.is_mirror ? " (mirror)" : "")),
    RUN_CELLS.map((cell, n) => h("td", { "data-name": RUN_HEADS[n], class: NUMBERS.has(RUN_HEADS[n]) && "number" }, cell(run))));
}

// What has changed of a run, in its place: the link and the box keep the focus.
function showRun(run) {
  const row = rowOfRun(run.key);
  if (!row) return drawRuns();
  const cells = [...row.children].slice(2);
  RUN_CELLS.forEach((cell, n) => fill((cells[n].replaceChildren(), cells[n]), {}, [cell(run)]));
  return undefined;
}

function drawRuns() {
  const list = [...runs.values()];
  const working = list.filter((run) => run.now);
  $("runs-words").textContent = `${plural(list.length, "run")}, ${count(working.length)} at work`;
  $("runs-rows").replaceChildren(...list.map(runRow));
  if (!list.length) $("runs-rows").append(h("tr", {}, h("td", { colspan: 9, class: "soft" }, "There is no run here yet.")));
  showChosen();
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
  const links = [...$("runs-rows").querySelectorAll("th a")];
  const now = links.findIndex((link) => link.closest("tr").contains(document.activeElement));
  links[now < 0 ? 0 : Math.max(0, Math.min(links.length - 1, now + by))]?.focus();
}

function chooseRun() {
  document.activeElement.closest?.("tr[data-key]")?.querySelector("input")?.click();
}
