// The page of an audit: rows are tasks, their statuses verdicts, and what a task did are its steps.

const AUDIT_COLUMNS = [
  { key: "status", name: "Verdict", rem: 11, cell: (row) => statusMark(row.status) },
  { key: "id", name: "Task", rem: 0, cell: titleCell },
  {
    key: "failed_calls", name: "Steps", number: true, rem: 10,
    cell: (row) => [count(row.calls), row.failed_calls ? h("span", { class: "failed" }, ` ${count(row.failed_calls)} against it`) : null],
  },
  { key: "setup_s", name: "Set-up", number: true, rem: 7, less: true, cell: (row) => seconds(row.setup_s) },
  { key: "check_s", name: "Check", number: true, rem: 7, cell: (row) => seconds(row.check_s) },
];

// Of an audit whose rows are steps: a page with a server has them as they come.
const STEP_COLUMNS = [
  { key: "passed", name: "Verdict", rem: 9.6, cell: verdictCell },
  { key: "id", name: "Task", rem: 0, cell: titleCell },
  { key: "step", name: "Step", rem: 10, cell: (row) => twoLines(row.step) },
  { key: "answer", name: "Result", share: 38, less: true, cell: (row) => twoLines(row.answer) },
];

function startAudit() {
  $("funnel").hidden = true;
  $("tab-conversations").textContent = "Tasks";
  $("query").placeholder = "id, evidence";
  for (const [id, words] of [["by-status", "Verdict "], ["by-tool", "Against it "], ["by-flag", "Defect "]]) $(id).parentElement.firstChild.data = words;
}

function drawAuditTiles({ count: all, statuses, sums }, tile) {
  const sound = statuses.find(([name]) => name === "sound")?.[1] ?? 0;
  const unfinished = meta.tasks / meta.samples - source.total;
  $("tiles").replaceChildren(
    tile("Tasks", count(all), unfinished ? `${count(unfinished)} more are unfinished` : ""),
    tile("Sound", percent(sound, all), count(sound)),
    tile("Steps", count(sums.calls), `${count(sums.failed_calls)} against their tasks`),
  );
}

function auditCharts(found, pick) {
  const defects = found.flags.map(([name, n]) => ({
    name, parts: [[statusKind(name), n]], words: `${short(n)}, ${percent(n, found.count)}`, pick: () => pick({ flag: name }),
  }));
  return [
    bars("Verdicts", plural(found.count, "task"), statusItems(found, pick)),
    bars("All defects", "a task may have several", defects),
    bars("Steps", "red: against their tasks", toolItems(found.tools, (tool) => pick({ tool }), "against")),
    histogram("Longest set-up", "time of each", found.histograms.setup_s, seconds),
    histogram("Longest check", "time of each", found.histograms.check_s, seconds),
  ].filter(Boolean);
}

const isErrorOf = (error) => typeof error === "object" && error !== null;

// What was done in a step, and what came of it.
function stepBlock(part) {
  const { step, way, repetition, against, command, forged, solution, not_applied: notApplied, not_tried: notTried, setup_s: setup, check, ...facts } = part;
  const { passed, duration_s: took, ...judged } = check ?? {};
  const { found, error, hollow, answer_passes: answer } = facts;
  const known = (values) => Object.fromEntries(Object.entries(values).filter(([, value]) => value != null && value !== ""));
  const done = known({ command, "forged files": forged?.join("\n"), solution, "cannot be applied": notApplied, "not tried": notTried });
  const result = known({
    error: isErrorOf(error) ? `${error.class}: ${error.message}` : error, passed: check ? passed : answer, "why it means nothing": hollow,
    leaks: found && (found.map(({ what }) => what).join("\n") || "none"), ...judged,
  });
  const name = `${step} ${way ?? repetition ?? ""}`;
  return h("section", { class: `call${against ? " is-error" : ""}`, role: "group", tabindex: -1, "aria-label": name },
    h("h4", {}, h("code", {}, name), h("span", { class: "soft" }, [setup != null && `set-up ${seconds(setup)}`, took && `check ${seconds(took)}`].filter(Boolean).join(", ")),
      against && h("strong", { class: "mark" }, "against the task")),
    h("div", { class: "sides" },
      h("div", {}, h("h5", {}, "done"), Object.keys(done).length ? valuesBlock(done) : h("p", { class: "soft" }, "nothing")),
      h("div", {}, h("h5", {}, "result"), Object.keys(result).length ? valuesBlock(result) : h("p", { class: "soft" }, "none"))));
}

// A step of an audit beside the other steps of its task.
function stepOfAudit(read) {
  const { row, record, around, step: { digest, image, ...part } } = read;
  return [
    ...readerHead(row, around),
    verdictHead(row, record),
    h("div", { class: "folds" }, fold("facts", "dataset row", () => jsonBlock(record.row)),
      fold("facts raw", "raw JSON", () => h("pre", { class: "text", tabindex: 0 }, jsonText(record)))),
    source.beforeMessages?.(read),
    h("div", { class: "messages" }, stepBlock(part)),
  ].flat();
}

function taskOfAudit(record, row, around) {
  return [
    readerHead(row, around),
    record.why && h("p", {}, record.why),
    factList([
      ["all defects", record.defects.join(", ")], ["digest", record.digest],
      ["image", record.image && `${record.image.reference} (${record.image.digest})`],
      ["longest set-up", seconds(record.times.setup_s)], ["longest check", seconds(record.times.check_s)],
    ]),
    h("div", { class: "folds" }, fold("facts raw", "raw JSON", () => h("pre", { class: "text", tabindex: 0 }, jsonText(record)))),
    h("div", { class: "messages" }, record.steps.map(stepBlock)),
  ].flat();
}
