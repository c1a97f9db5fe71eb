// What people decide about a conversation: a verdict, turns without loss, a note, the better sample.

const VERDICTS = [["keep", "Keep", "1"], ["reject", "Reject", "2"], ["fix", "Fix-me", "3"]];
const NAME_KEPT = "reviewer";

const done = []; // decisions that can be undone, the latest last: {key, posts, words, id}
let saving = Promise.resolve();

const reviewer = () => $("who").value.trim() || $("who").placeholder;

function startDeciding(who) {
  $("who").placeholder = who;
  $("who").value = localStorage.getItem(NAME_KEPT) ?? "";
  $("who").addEventListener("change", () => {
    localStorage.setItem(NAME_KEPT, $("who").value.trim());
    if (open && !open.live) reread();
  });
}

const mine = (row) => row.labels?.find((label) => label.who === reviewer()) ?? {};

function announce(words) {
  const place = $("decide-words");
  if (place) place.textContent = words;
}

// The panel under a conversation.
function decisions(read) {
  return h("section", { id: "decide", "aria-label": "Decide" }, panelParts(read));
}

function panelParts({ row }) {
  if (!about.run.can_label) return [h("p", { class: "soft" }, "Decisions are made where the run is: this is a copy, or another user's run."), labelsOf(row)];
  const own = mine(row);
  const button = ([verdict, words, key]) => h("button", {
    type: "button", class: `verdict ${VERDICT_KINDS[verdict]}`, "aria-pressed": String(own.verdict === verdict), "aria-keyshortcuts": key,
    click: () => decideVerdict(verdict),
  }, words, " ", h("kbd", {}, key));
  return [
    h("div", { class: "bar" }, VERDICTS.map(button),
      h("button", { type: "button", "aria-keyshortcuts": "u", disabled: !done.length, click: undo }, "Undo ", h("kbd", {}, "u")),
      h("button", { type: "button", "aria-keyshortcuts": "n", click: nextUndecided }, "Next undecided ", h("kbd", {}, "n")),
      h("label", { class: "note-field" }, "Note ", h("kbd", {}, "m"), " ", h("input", { id: "note", maxlength: 10_000, value: own.note ?? "", autocomplete: "off", change: (event) => decideNote(event.target.value), keydown: leaveNote }))),
    labelsOf(row),
    h("output", { id: "decide-words", role: "status" }),
  ];
}

function leaveNote(event) {
  if (event.key === "Enter") event.target.blur();
}

// What every reviewer said.
function labelsOf(row) {
  const words = (label) => [
    verdictMark(label.verdict), label.no_loss?.length ? `no loss on ${label.no_loss.join(", ")}` : null,
    label.over && Object.keys(label.over).length ? `better than ${Object.keys(label.over).join(", ")}` : null, label.note && `“${label.note}”`,
  ].filter(Boolean).flatMap((part, n) => (n ? [" · ", part] : [part]));
  const shown = (row.labels ?? []).map((label) => [label, words(label)]).filter(([, said]) => said.length);
  if (!shown.length) return null;
  const verdicts = new Set(shown.map(([{ verdict }]) => verdict).filter(Boolean));
  const agree = shown.filter(([{ verdict }]) => verdict).length < 2 ? null
    : h("li", {}, verdicts.size > 1 ? h("span", { class: "mark" }, "they differ") : h("span", { class: "soft" }, "they agree"));
  return h("ul", { class: "labels", "aria-label": "What reviewers said" },
    shown.map(([label, said]) => h("li", {}, h("strong", {}, label.who), label.who === reviewer() ? " (you)" : "", ": ", said)), agree);
}

// Replace all of the panel but the note that is being written: browsers take a field that is removed for a
// changed one, and half a note would be saved.
function redrawAround(writing, fresh) {
  const bar = writing.parentElement;
  for (const child of [...bar.children]) if (child !== writing) child.remove();
  bar.prepend(...[...fresh.firstElementChild.children].filter((child) => !child.matches(".note-field")));
  while (bar.nextSibling) bar.nextSibling.remove();
  bar.after(...[...fresh.children].slice(1));
}

function redrawDecisions() {
  const panel = $("decide");
  if (!panel || !open) return;
  const said = $("decide-words")?.textContent;
  const writing = document.activeElement === $("note") ? $("note").closest("label") : null;
  const name = panel.contains(document.activeElement) ? document.activeElement.textContent : null;
  if (writing) redrawAround(writing, h("section", {}, panelParts(open)));
  else fill((panel.replaceChildren(), panel), {}, [panelParts(open)]);
  announce(said ?? "");
  if (name && !writing) [...panel.querySelectorAll("button")].find((button) => button.textContent === name)?.focus({ preventScroll: true });
  for (const mark of $("reader").querySelectorAll(":scope > .messages > article .turn-mark")) showTurnMark(mark);
}

// Send decisions, each about one record; what they replaced is kept for an undo.
function decide(posts, words, { isUndo = false } = {}) {
  const { key } = about.run;
  const { id } = open ?? posts[0];
  const work = saving.then(async () => {
    const before = [];
    try {
      for (const post of posts) {
        const said = await ask(`/api/runs/${encodeURIComponent(key)}/labels`, { ...post, who: reviewer() });
        before.unshift({ id: post.id, record: post.record, ...said.before });
        showLabels(key, post.id, said);
      }
    } catch (error) {
      trouble(error.message, { lasts: false });
    }
    if (!isUndo && before.length) done.push({ key, posts: before, words, id });
    redrawDecisions();
    announce(before.length ? words : "not saved");
  });
  saving = work;
  return work;
}

// The new labels of a record wherever it is shown.
function showLabels(key, id, { labels, verdict }) {
  if (about?.run.key !== key) return;
  const shown = [open, pair?.read].filter((read) => read?.id === id).map((read) => read.row);
  for (const list of pages.values()) shown.push(...list.filter((row) => row.id === id));
  for (const row of shown) Object.assign(row, { labels, verdict });
  for (const one of open?.siblings ?? []) if (one.id === id) one.verdict = verdict;
  if (open?.siblings?.length > 1) drawSiblings($("siblings"), open);
  if (!meta.has_labels) {
    meta.has_labels = true;
    startTable();
  }
}

const post = (read, change) => ({ id: read.id, record: read.row.record, ...change });
const canDecide = () => open && !open.live && !meta.is_steps && about.run.can_label;

function decideVerdict(verdict) {
  if (!canDecide()) return undefined;
  const isBack = mine(open.row).verdict === verdict;
  return decide([post(open, { verdict: isBack ? null : verdict })], isBack ? "taken back" : `decided: ${verdict}`);
}

function decideNote(note) {
  if (!canDecide() || note.trim() === (mine(open.row).note ?? "")) return undefined;
  return decide([post(open, { note: note.trim() || null })], "note kept");
}

function markTurn(turn = Number(document.activeElement.closest?.("#reader > .messages > article")?.dataset.turn)) {
  if (!canDecide()) return undefined;
  if (!turn) {
    announce("no loss is set on turns of the model; go to one by j and k");
    return undefined;
  }
  const marked = mine(open.row).no_loss ?? [];
  const isMarked = marked.includes(turn);
  const next = isMarked ? marked.filter((one) => one !== turn) : [...marked, turn].sort((a, b) => a - b);
  return decide([post(open, { no_loss: next.length ? next : null })], isMarked ? `turn ${turn} carries loss again` : `no loss on turn ${turn}`);
}

function turnMark(turn) {
  if (!about.run.can_label || !turn.turn || open?.live) return null;
  const button = h("button", { type: "button", class: "turn-mark", "data-turn": turn.turn, "aria-keyshortcuts": "x", click: () => markTurn(turn.turn) });
  showTurnMark(button, open);
  return button;
}

function showTurnMark(button) {
  const turn = Number(button.dataset.turn);
  const by = (open?.row.labels ?? []).filter((label) => label.no_loss?.includes(turn)).map((label) => label.who);
  const isMine = by.includes(reviewer());
  button.setAttribute("aria-pressed", String(isMine));
  fill((button.replaceChildren(), button), {}, [isMine ? "No loss on this turn ✓" : "No loss on this turn", by.length && !(isMine && by.length === 1) ? ` (${by.join(", ")})` : ""]);
}

// The sample that is read is better than the other one, or the other way round.
async function prefer(isThis) {
  if (!canDecide()) return undefined;
  const read = open;
  const rest = others(read);
  if (!pair && rest.length !== 1) {
    announce(rest.length ? "show the other sample first: s" : "this prompt has no other sample");
    return undefined;
  }
  let other = pair?.read;
  try {
    other ??= { id: rest[0].id, ...(await source.read(rest[0].id)) };
  } catch (error) {
    return trouble(error.message, { lasts: false });
  }
  const [better, worse] = isThis ? [read, other] : [other, read];
  const over = (one) => Object.keys(mine(one.row).over ?? {});
  const posts = [post(better, { over: [...new Set([...over(better), worse.id])] })];
  if (over(worse).includes(better.id)) {
    const left = over(worse).filter((id) => id !== better.id);
    posts.unshift(post(worse, { over: left.length ? left : null }));
  }
  return decide(posts, `${better.id} is better than ${worse.id}`);
}

async function undo() {
  await saving;
  const last = done.pop();
  if (!last) return announce("nothing to undo");
  const place = `${keyLink(last.key)}/${encodeURIComponent(last.id)}`;
  if (!open || open.key !== last.key || open.id !== last.id) {
    location.hash = place;
    await shown(last.id);
  }
  return decide(last.posts, `undone: ${last.words}`, { isUndo: true });
}

// Wait until a conversation is shown, as `show` is asked by the address.
async function shown(id) {
  for (let n = 0; n < 100 && open?.id !== id; n += 1) await new Promise((resolve) => setTimeout(resolve, 20));
}

async function nextUndecided() {
  await saving;
  if (open) {
    const to = open.around.undecided;
    if (to != null) go(to);
    else announce("no conversation of these is left undecided");
    return;
  }
  const parts = new URLSearchParams(query);
  parts.append("undecided_by", reviewer());
  parts.append("limit", "1");
  try {
    const { rows: [first] } = await ask(runPath(`/rows?${parts}`));
    if (first) location.hash = source.link(first.id);
    else trouble("No conversation of these is left undecided.", { lasts: false });
  } catch (error) {
    trouble(error.message, { lasts: false });
  }
}

// Labels have changed, perhaps by others: those of the conversation that is read.
async function othersDecided() {
  const { id } = open;
  const read = await source.read(id).catch(() => null);
  if (!read || read.live || open?.id !== id) return;
  Object.assign(open.row, { labels: read.row.labels, verdict: read.row.verdict });
  open.around = read.around;
  redrawDecisions();
}

async function showAgreement() {
  const { labels } = await ask(runPath("/labels")).catch(() => ({ labels: {} }));
  const { verdicts = {}, reviewers = {}, agreement = [] } = labels;
  $("agreement").hidden = !Object.keys(verdicts).length;
  $("agreement-words").textContent = Object.entries(verdicts).map(([name, n]) => `${visible(name)} ${count(n)}`).join(", ");
  const line = (name, amount, words) => h("tr", {}, h("th", { scope: "row" }, name), h("td", { class: "number" }, amount), h("td", {}, words));
  $("agreement-table").tBodies[0].replaceChildren(
    ...Object.entries(reviewers).map(([who, n]) => line(who, count(n), "decided")),
    ...agreement.map((one) => line(one.between.join(" and "), one.same == null ? "–" : percent(one.same, 1),
      `the same on ${count(one.records)}${one.kappa == null ? "" : `, kappa ${digits(one.kappa)}`}`)));
}
