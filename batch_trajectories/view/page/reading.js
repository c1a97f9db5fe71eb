// What only a server can show of a conversation: the request of each turn, the other samples of its
// prompt, and its end while it is in flight.

const LONE = { turns: [], tool_calls: [], inner: [], discarded: [], resumes: [] };

// A fold whose content comes from the server.
function lateFold(kind, words, make) {
  return fold(kind, words, () => {
    const box = h("div", {}, h("p", { class: "soft" }, "reading …"));
    make().then((content) => box.replaceChildren(content), (error) => box.replaceChildren(h("p", { class: "mark" }, visible(error.message))));
    return box;
  });
}

function requestOf(turn, read) {
  const seen = read.requests?.find((one) => one.part === "main")?.turns.find((one) => one.turn === turn.turn);
  if (!seen) return null;
  const words = `request of this turn: ${plural(seen.messages, "message")}${seen.plain ? ", those above" : ", not all as above"}`;
  return lateFold(`facts request${seen.plain ? "" : " other"}`, words, async () => {
    const { messages, tools } = await ask(runPath(`/request?${new URLSearchParams({ id: read.id, part: "main", turn: turn.turn })}`));
    return h("div", { class: "inner" },
      h("p", { class: "soft" }, `${plural(tools.length, "tool")} on offer: ${tools.map((tool) => tool.function.name).join(", ")}`),
      messagesOf({ ...LONE, messages }));
  });
}

// The other samples of the prompt; they are asked for when the conversation is shown.
function siblingsOf(read) {
  closePair();
  const box = h("section", { id: "siblings", "aria-label": meta.is_steps ? "Steps of this task" : "Samples of this prompt", hidden: !hasSamples() }, h("h3", {}, meta.is_steps ? "Steps of this task" : "Samples of this prompt"));
  // As high as it will be, so that the conversation below stays in its place.
  if (hasSamples()) box.style.minHeight = `${40 + 31 * Math.min(meta.samples, 8)}px`;
  ask(runPath(`/siblings?${new URLSearchParams({ id: read.id })}`)).then(({ siblings }) => {
    read.siblings = siblings;
    if (siblings.length > 1 && open?.row === read.row) drawSiblings(box, read);
    else box.hidden = true;
  }, (error) => trouble(error.message, { lasts: false }));
  return box;
}

const others = (read) => meta.is_steps ? [] : (read.siblings ?? []).filter(({ id }) => id !== read.id);

function sameWords({ same_turns: same, turns }, read) {
  if (!turns && !read.record.turns.length) return "";
  if (!same) return "differs from the first turn";
  return same === turns && same === read.record.turns.length ? "the same in all turns" : `the same up to turn ${same}`;
}

function drawSiblings(box, read) {
  box.hidden = false;
  if (meta.is_steps) {
    drawSteps(box, read);
    return;
  }
  const ofModels = new Set(read.siblings.map(({ model }) => model)).size > 1;
  const line = (one) => {
    const isThis = one.id === read.id;
    return h("tr", { class: isThis && "selected" },
      h("th", { scope: "row" }, isThis ? one.id : h("a", { href: source.link(one.id) }, one.id)),
      h("td", {}, h("span", { class: `status ${statusKind(one.status)}` }, one.status)),
      h("td", {}, one.reward == null ? "" : h("span", { class: one.passed === false && "failed" }, one.passed === false ? "✗ " : one.passed ? "✓ " : "", digits(one.reward))),
      h("td", { class: "number" }, plural(one.turns, "turn")),
      ofModels && h("td", {}, one.model),
      h("td", {}, verdictMark(one.verdict)),
      h("td", {}, isThis ? "this one" : sameWords(one, read)),
      h("td", {}, !isThis && h("button", { type: "button", click: () => showPair(one) }, "side by side")));
  };
  box.replaceChildren(
    h("h3", {}, "Samples of this prompt ", h("small", { class: "by-key" }, "s: the next one beside this one")),
    h("div", { class: "wide" }, h("table", { class: "plain" }, h("tbody", {}, read.siblings.map(line)))));
}

// The steps of the task of an audit: what each did, and whether that is as it should be.
function drawSteps(box, read) {
  box.replaceChildren(h("h3", {}, "Steps of this task"), h("div", { class: "wide" }, h("table", { class: "plain" }, h("tbody", {}, read.siblings.map((one) =>
    h("tr", { class: one.id === read.id && "selected" },
      h("th", { scope: "row" }, one.id === read.id ? one.step : h("a", { href: source.link(one.id) }, one.step)),
      h("td", {}, one.passed == null ? "" : passMark(one.passed)),
      h("td", {}, h("span", { class: "snippet" }, one.answer))))))));
}

let pair = null; // {id, read}: the sample that is beside the one that is read

async function showPair(one) {
  const read = open;
  try {
    const other = await source.read(one.id);
    if (open !== read) return;
    pair = { id: one.id, same: one.same_turns, read: { id: one.id, ...other } };
  } catch (error) {
    trouble(error.message, { lasts: false });
    return;
  }
  $("pair")?.remove();
  const side = (of, label) => {
    const messages = messagesOf(of.record);
    for (const article of messages.children) {
      const turn = Number(article.dataset.turn);
      article.tabIndex = -1;
      if (turn && turn <= pair.same) article.classList.add("same");
      if (turn === pair.same + 1) {
        article.classList.add("parts");
        article.querySelector("h3").append(h("span", { class: "tag" }, "they part here"));
      }
    }
    return h("section", { "aria-label": label }, h("h3", {}, `${label}: `, of.id, " ",
      of.row.reward == null ? null : h("span", { class: of.row.passed === false ? "failed" : "soft" }, checkWords(of.row)), " ", verdictMark(of.row.verdict)), messages);
  };
  const box = h("div", { id: "pair", tabindex: -1, role: "region", "aria-label": "Two samples side by side" },
    h("p", { class: "bar" }, h("button", { type: "button", click: closePair }, "Close"),
      h("button", { type: "button", click: () => prefer(true) }, "This one is better ", h("kbd", {}, "4")),
      h("button", { type: "button", click: () => prefer(false) }, "The other one is better ", h("kbd", {}, "5")),
      pair.same ? h("span", { class: "soft" }, `the first ${plural(pair.same, "turn")} are the same`) : null),
    h("div", { class: "columns" }, side(read, "this one"), side(pair.read, "the other one")));
  $("reader").querySelector(":scope > .messages").before(box);
  $("reader").classList.add("has-pair");
  box.querySelector(".parts")?.scrollIntoView({ block: "center" });
  box.focus({ preventScroll: true });
}

function closePair() {
  pair = null;
  $("pair")?.remove();
  $("reader").classList.remove("has-pair");
}

function nextSibling() {
  const rest = others(open);
  if (!rest.length) return;
  const now = rest.findIndex(({ id }) => id === pair?.id);
  if (now === rest.length - 1) closePair();
  else showPair(rest[now + 1]);
}

const SHOWN_OF_PROMPT = 140; // characters, as in the table

// A conversation that is in flight, in the shape of one that has ended.
function liveRead(live) {
  const record = { ...LONE, status_reason: null, error: null, row: {}, tools: [], toolsets: [], usage: null, cost_usd: null, attempt: null, model: live.model_returned, ...live };
  const asked = live.messages.find((message) => message.role === "user")?.content ?? "";
  const row = { id: live.id, prompt: asked.slice(0, SHOWN_OF_PROMPT), status: live.is_over ? "ended" : "in flight", flags: [], calls: live.tool_calls.length, failed_calls: 0, reward: null, duration_s: null };
  return { id: live.id, live, row, record, form: null, around: { before: null, after: null, place: null, matching: 0 } };
}

function liveWords({ live }) {
  const answered = new Set(live.messages.filter((message) => message.role === "tool").map((message) => message.tool_call_id));
  const calls = (live.messages.findLast((message) => message.role === "assistant")?.tool_calls ?? []).filter((call) => !answered.has(call.id));
  const doing = live.is_over ? "it has ended; its record comes"
    : calls.length ? `${calls.map((call) => call.function.name).join(", ")} at work` : "waiting for the model";
  const stop = about.run.can_steer && !live.is_over && h("button", { type: "button", click: () => stopConversation(live.id) }, "Stop this conversation");
  // Drawn again with each event: what the run said stays.
  const said = $("live-answer")?.dataset.id === live.id ? $("live-answer").textContent : "";
  return h("p", { class: "bar", id: "live" }, h("strong", { role: "status" }, doing), stop, h("output", { id: "live-answer", class: "soft", role: "status", "data-id": live.id }, said));
}

function showLive(live) {
  if (open?.id !== live.id || !open.live) return;
  const atEnd = window.innerHeight + window.scrollY > document.documentElement.scrollHeight - 120;
  const top = window.scrollY;
  const turn = document.activeElement.closest?.("article")?.dataset.turn;
  open = { ...open, ...liveRead(live) };
  drawConversation();
  if (turn) turnOf(turn)?.focus({ preventScroll: true });
  window.scrollTo(0, atEnd ? document.documentElement.scrollHeight : top);
  if (live.is_over) reread();
}

// The record of a conversation that was in flight; until it is there, events ask again.
async function reread() {
  const { id } = open;
  const read = await source.read(id).catch(() => null);
  if (!read || read.live || open?.id !== id) return;
  const top = window.scrollY;
  open = { id, ...read };
  drawConversation();
  window.scrollTo(0, top);
}
