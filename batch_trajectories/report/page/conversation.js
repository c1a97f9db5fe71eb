// One trajectory as a conversation.

const INLINE = /^\s*<(think|thinking|reasoning|REASONING_SCRATCHPAD)>([\s\S]*?)<\/\1>/;

const OPEN_REASONING = 500; // characters; longer reasoning is folded

let isReasoningOpen = false;

function reasoningOf(message) {
  let text = message.content ?? "";
  const found = [message.reasoning ?? ""];
  for (let match; (match = INLINE.exec(text)); text = text.slice(match[0].length)) found.push(match[2].trim());
  const reasoning = found.filter((part) => part.trim()).join("\n\n");
  return { reasoning, text: found.length > 1 ? text.trimStart() : text };
}

// The arguments of a call by name; what is no JSON object as it was written.
function argumentsBlock(text) {
  const values = parsed(text);
  if (!isObject(values)) return textBlock(text, "malformed");
  return Object.keys(values).length ? valuesBlock(values) : h("p", { class: "soft" }, "no arguments");
}

function callBlock(call, result, facts, inner) {
  const failure = result?.is_error && (result.details?.failure ?? "reported");
  const state = !result ? "no result" : failure ? `failed: ${failure}` : "";
  const details = result?.details && Object.keys(result.details).length ? result.details : null;
  const { exitCode, block } = result ? resultParts(result) : {};
  return h("section", { class: `call${failure ? " is-error" : ""}`, role: "group", "aria-label": `call of ${call.function.name}` },
    h("h4", {}, h("code", {}, call.function.name), facts && h("span", { class: "soft" }, seconds(facts.duration_s)),
      exitCode != null && h("span", { class: `badge ${exitCode === 0 ? "good" : "bad"}` }, `exit ${exitCode}`),
      state && h("strong", { class: "mark" }, state)),
    h("div", { class: "sides" },
      h("div", {}, h("h5", {}, "arguments"), argumentsBlock(call.function.arguments)),
      h("div", {}, h("h5", {}, "result"), result ? block : h("p", { class: "soft" }, "none"), picturesOf(result),
        notesOf(result), details && fold("facts", "details", () => jsonBlock(details)))),
    inner && fold("inner", `conversation of ${inner.name}, ${plural(inner.turns.length, "turn")}`, () => messagesOf(inner)));
}

const SHOWN_PICTURES = /^data:image\/(png|jpeg|gif|webp);base64,/;

// The address of a picture in a part of a message, in the forms of the APIs; undefined for other parts.
function pictureIn(part) {
  const { image_url: url, source, inlineData, inline_data: inline = inlineData, fileData, file_data: file = fileData } = part;
  if (url) return url.url ?? url;
  if (part.type === "image" && source) return source.url ?? `data:${source.media_type};base64,${source.data}`;
  if (inline) return `data:${inline.mimeType ?? inline.mime_type};base64,${inline.data}`;
  return file?.fileUri ?? file?.file_uri;
}

// The pictures that are stored with a message. A picture that has only an address is not asked for.
function picturesOf(message) {
  const parts = message?.provider_blocks?.blocks ?? [];
  const shown = parts.map((part) => {
    if (part.repeats) return h("p", { class: "soft" }, "a picture or file that an earlier message has");
    const address = pictureIn(part);
    if (typeof address !== "string") return null;
    if (SHOWN_PICTURES.test(address)) return h("img", { src: address, alt: "picture of this message" });
    return h("p", { class: "soft" }, address.startsWith("data:") ? `a file, not shown: ${address.slice(5, 60).split(/[;,]/)[0]}` : `not loaded: ${address.slice(0, 500)}`);
  }).filter(Boolean);
  return shown.length ? h("div", { class: "pictures" }, shown) : null;
}

function notesOf(message) {
  return message?.notes?.length
    ? h("p", { class: "note" }, `written into it by the runtime: ${message.notes.join(", ")}`) : null;
}

function turnFacts(turn) {
  const usage = turn.usage ?? {};
  const hasTokens = usage.input_tokens || usage.output_tokens;
  const parts = [
    hasTokens ? `${short(usage.input_tokens)} in` : null,
    usage.cache_read_tokens ? `${short(usage.cache_read_tokens)} (${percent(usage.cache_read_tokens, usage.input_tokens)}) cached` : null,
    hasTokens ? `${short(usage.output_tokens)} out` : null,
    turn.cost_usd ? dollars(turn.cost_usd) : null, turn.duration_s == null ? null : seconds(turn.duration_s), turn.finish_reason,
  ];
  return parts.filter(Boolean).join(" · ");
}

function replyBody(message) {
  const { reasoning, text } = reasoningOf(message);
  return [
    reasoning && fold("reasoning", reasoning.length <= OPEN_REASONING ? "reasoning" : `reasoning, ${plural(reasoning.length, "character")}`,
      () => textBlock(reasoning), isReasoningOpen || reasoning.length <= OPEN_REASONING),
    text.trim() && textBlock(text),
    message.unusable && h("p", { class: "mark" }, `unusable: ${message.unusable}`),
    message.repairs?.length ? fold("facts", "repaired by the runtime", () => jsonBlock(message.repairs)) : null,
  ];
}

function discardedBlock(reply) {
  return fold("discarded", `a reply was set aside: ${reply.discarded} (${turnFacts(reply)})`, () => {
    const calls = (reply.message.tool_calls ?? []).map((call) => callBlock(call));
    return h("div", {}, replyBody(reply.message), calls);
  });
}

function resumedBlock(resume) {
  const lost = resume.interrupted.length ? `; cut off: ${resume.interrupted.join(", ")}` : "";
  const again = resume.repeated.length ? `; run again: ${resume.repeated.join(", ")}` : "";
  return h("p", { class: "note" }, `taken up by a later process after turn ${resume.turn}${lost}${again}`);
}

// The calls that a simulated user made before its message of this number, which leave `inner`.
function userCallsBlock(inner, number) {
  const user = inner.get(`simulated_user#${number}`);
  if (!user?.tool_calls.length) return null;
  inner.delete(user.key);
  const words = `the user called tools: ${plural(user.tool_calls.length, "call")}, ${plural(user.turns.length, "turn")} (${user.key}); no loss, unseen by the agent`;
  return fold("inner user", words, () => messagesOf(user));
}

// The messages of a conversation, or of one inside it; `read` is the whole, whose turns have links of
// their own, and say whether they carry loss.
function messagesOf(part, read = null) {
  const { messages, turns } = part;
  const said = messages.map((m, n) => [m, n]).filter(([m]) => m.role === "assistant").map(([, n]) => n);
  const own = turns.length ? said.slice(-turns.length) : [];
  const results = new Map(messages.filter((m) => m.role === "tool").map((m) => [m.tool_call_id, m]));
  const facts = new Map(part.tool_calls.map((call) => [`${call.turn}/${call.call}`, call]));
  const inner = new Map(part.inner.map((one) => [one.key, one]));
  const blocks = [];
  const calls = new Set();
  const losses = read?.form ? lossesOf(messages, read.form) : new Map();
  const sent = (part.notes ?? []).filter((note) => note.reason === "user_turn");
  let written = 0;
  messages.forEach((message, n) => {
    if (message.role === "tool" && calls.has(message.tool_call_id)) return; // beside its call
    const turn = turns[own.indexOf(n)];
    if (message.role === "user" && n > own[0] && sent[written] && message.content.startsWith(sent[written].text)) {
      written += 1;
      blocks.push(userCallsBlock(inner, written));
    } else if (message.role === "user" && n < own[0]) {
      blocks.push(userCallsBlock(inner, 0)); // before a message in place of a prompt
    }
    if (turn) {
      blocks.push(...part.resumes.filter((resume) => resume.turn === turn.turn - 1).map(resumedBlock));
      blocks.push(...part.discarded.filter((reply) => reply.turn === turn.turn).map(discardedBlock));
    }
    const callBlocks = (message.tool_calls ?? []).map((call, place) => {
      calls.add(call.id);
      const subagent = inner.get(call.id);
      inner.delete(call.id);
      return callBlock(call, results.get(call.id), turn && facts.get(`${turn.turn}/${place}`), subagent);
    });
    blocks.push(messageBlock(message, turn, read, callBlocks, losses.get(message)));
  });
  const last = turns.length ? turns[turns.length - 1].turn : 0;
  blocks.push(...part.discarded.filter((reply) => reply.turn > last).map(discardedBlock));
  blocks.push(...part.resumes.filter((resume) => resume.turn >= last).map(resumedBlock));
  blocks.push(userCallsBlock(inner, written + 1)); // before a message that was not sent
  const stages = [...inner.values()].map((one) =>
    fold("inner", `${one.name || "stage"} (${one.key}), ${plural(one.turns.length, "turn")}`, () => messagesOf(one)));
  return h("div", { class: "messages" }, stages, blocks);
}

// Which replies carry loss, and why the others do not; unknown where rows have other turns.
function lossesOf(messages, form) {
  const replies = messages.filter((message) => message.role === "assistant");
  const learnt = form.turns.filter(([, , isLearnt]) => isLearnt);
  if (learnt.length !== replies.length) return new Map();
  const masked = maskedTurns(form);
  return new Map(replies.map((reply, n) => [reply, masked.get(learnt[n]) ?? []]));
}

function lossMark(reasons, file) {
  if (!reasons) return null;
  if (!reasons.length && file === "partial") return h("span", { class: "tag", title: "This conversation ended early: its row is in exports/partial.jsonl, not in the training file" }, "loss");
  return reasons.length ? h("span", { class: "tag" }, `no loss: ${reasons.join(", ")}`)
    : h("span", { class: "tag loss", title: "The bar at the left marks turns that carry loss" }, "loss");
}

function messageBlock(message, turn, read, callBlocks, reasons) {
  const name = turn ? `turn ${turn.turn}` : message.role;
  const isReply = message.role === "assistant";
  const heading = h("h3", {},
    read && turn ? h("a", { href: source.link(read.id, turn.turn), title: "link to this turn" }, name) : name,
    h("span", { class: "soft" }, turn ? turnFacts(turn) : isReply ? "brought along by the prompt" : ""),
    read?.row.missed_turns?.includes(turn?.turn) ? h("span", { class: "tag", title: "It lacked more than a tenth of what the request before had left in the prompt cache" }, "missed the cache") : null,
    lossMark(reasons, read?.form?.file));
  const beside = read && turn && source.besideTurn ? h("div", { class: "beside" }, source.besideTurn(turn, read)) : null;
  const body = isReply ? replyBody(message)
    : message.role === "system" && message.content.length > 600
      ? fold("facts", `${count(message.content.length)} characters`, () => textBlock(message.content))
      : textBlock(message.content);
  const learnt = reasons && !reasons.length ? (read?.form?.file === "training" ? " learnt" : " learnt-partly") : "";
  return h("article", { class: `message ${message.role}${learnt}`, tabindex: -1, "data-turn": turn?.turn, "aria-label": name },
    heading, body, picturesOf(message), isReply ? null : notesOf(message), callBlocks, beside);
}

function factList(pairs) {
  return h("dl", { class: "facts" }, pairs.filter(([, value]) => value != null && value !== "").map(([name, value]) =>
    h("div", {}, h("dt", {}, name), h("dd", {}, value))));
}

const EXPORTED = {
  training: "training row, in the training file",
  partial: "training row, in exports/partial.jsonl",
  rejects: "no training row",
};

// What a check said: what is known of it, texts as they are.
function checkBlock(check) {
  return valuesBlock(Object.fromEntries(Object.entries(check).filter(([, value]) => value != null && value !== "")), "", valueBlock);
}

// Tokens in (with those from a cache) and out of each turn, in two rows of their own scales.
function tokensOf(turns) {
  const of = (key) => turns.map((turn) => turn.usage?.[key] ?? 0);
  const [all, cached, out] = ["input_tokens", "cache_read_tokens", "output_tokens"].map(of);
  const most = (values) => Math.max(1, ...values);
  const width = Math.min(28, 680 / turns.length);
  const bar = (n, value, top, low, kind) => svg("rect",
    { class: kind, x: n * width, width: Math.max(0.5, width - 1), y: low - (value / top) * 50, height: (value / top) * 50 });
  const drawn = turns.map((turn, n) => svg("g", {},
    svg("title", {}, `turn ${turn.turn}: ${short(all[n])} in, ${short(cached[n])} of them cached, ${short(out[n])} out`),
    bar(n, all[n], most(all), 64, "fair"), bar(n, cached[n], most(all), 64, "rest"), bar(n, out[n], most(out), 130, "good")));
  const words = `in: at most ${short(most(all))}, grey is cached; out: at most ${short(most(out))}`;
  return h("figure", {}, h("figcaption", {}, h("strong", {}, "Tokens of each turn"), h("span", {}, words)), svg("svg",
    { viewBox: `0 0 ${Math.max(340, turns.length * width)} 132`, role: "img", "aria-label": `Tokens of each turn, ${words}` }, drawn));
}

// The row of the export; what carries loss is marked, the rest is context.
function trainingForm(form) {
  if (form.file === "rejects") return h("p", { class: "mark" }, `${form.reason}: ${form.detail}`);
  const all = [["system", form.system, false], ...form.turns];
  const reasons = maskedTurns(form);
  let given = form.given;
  return h("div", {},
    h("p", { class: "soft" }, "Marked: what carries loss where a trainer learns from the turns of gpt. The rest is context."),
    all.map((turn) => {
      const [speaker, text, isLearnt] = turn;
      const masked = reasons.get(turn);
      const hasLoss = isLearnt && !masked;
      const isGiven = isLearnt && given-- > 0;
      const words = [speaker, hasLoss ? "carries loss" : "", isGiven ? "brought along by the prompt" : "",
        masked ? `masked in the dataset: ${masked.join(", ")}` : ""];
      return h("section", { class: hasLoss ? "loss" : "context" },
        h("h5", {}, words.filter(Boolean).join(" · ")),
        speaker === "system" ? fold("facts", `${count(text.length)} characters`, () => textBlock(text)) : textBlock(text));
    }));
}

// The turns of gpt that the dataset masks, with the reasons.
function maskedTurns(form) {
  const learnt = form.turns.filter(([, , hasLoss]) => hasLoss);
  return new Map(Object.entries(form.masked ?? {}).map(([number, reasons]) => [learnt[number - 1], reasons]));
}

function trainingWords(form) {
  const characters = (turns) => turns.reduce((total, [, text]) => total + text.length, 0);
  const masked = maskedTurns(form);
  const loss = characters(form.turns.filter((turn) => turn[2] && !masked.has(turn)));
  if (form.file === "rejects") return `${EXPORTED.rejects}: ${form.reason}`;
  const all = form.system.length + characters(form.turns);
  const without = masked.size ? `; the dataset masks ${plural(masked.size, "turn")}` : "";
  return `${EXPORTED[form.file]}: loss on ${count(loss)} of ${count(all)} characters${without}`;
}

// The prompt and what became of it, each in a line.
function verdictHead(row, record) {
  const prompt = row.prompt ?? "";
  const verdict = row.passed == null ? h("span", { class: "soft" }, record.finished_at === undefined ? "not over yet" : meta.is_checked ? "not judged" : "no check")
    : passMark(row.passed);
  const part = (name, value) => value == null || value === "" ? null : h("span", { class: "part-of-head", title: visible(value) }, h("span", { class: "soft" }, `${name} `), value);
  const reward = row.reward == null || (row.passed != null && row.reward === Number(row.passed)) ? null : digits(row.reward);
  return h("section", { class: "verdict-head", "aria-label": "Prompt and verdict" },
    h("p", { title: visible(prompt) }, prompt),
    h("p", {}, verdict,
      part(row.step ? `${row.step}:` : "answer", row.answer), part("expected", row.expected), part("reward", reward),
      record.status_reason && !record.error && record.status_reason !== "not the expected answer" ? h("span", { class: "soft part-of-head", title: visible(record.status_reason) }, record.status_reason) : null));
}

// The ways to other rows, and the title.
function readerHead(row, { before, after, place, matching: all }) {
  const step = (to, words, key, name) => to != null
    ? h("a", { class: "button", href: source.link(to), "aria-keyshortcuts": key, "aria-label": name, title: name }, words)
    : h("span", { class: "button off", "aria-hidden": "true" }, words);
  return [
    h("div", { class: "reader-top" }, h("nav", { "aria-label": "Other rows" },
      h("a", { class: "button", href: source.link() }, "☰ table"), step(before, "←", "ArrowLeft", "previous conversation"), step(after, "→", "ArrowRight", "next conversation"),
      place != null && h("span", { class: "soft" }, `${count(place + 1)} of ${count(all)}`)),
    h("h2", { tabindex: -1, id: "reader-title" }, row.id, " ", statusMark(row.status))),
  ];
}

// The whole reader: prompt and verdict, folds, the messages, and what else is known at the side.
function conversation(read) {
  const { row, record, form, around } = read;
  if (meta.is_audit) return taskOfAudit(record, row, around);
  if (read.step) return stepOfAudit(read);
  return [
    ...readerHead(row, around),
    verdictHead(row, record),
    record.error && h("p", { class: "trouble" }, `${record.error.class}: ${record.error.message}`),
    sideFacts(row, record),
    foldsOf(record, form),
    source.beforeMessages?.(read),
    messagesOf(record, read),
    source.afterMessages?.(read),
  ];
}

// Facts at the side of a wide screen, folded on a narrow one; what is unknown or nothing is left out.
function sideFacts(row, record) {
  const usage = record.usage ?? {};
  const cached = row.cached_share == null ? "" : `${percent(row.cached_share, 1)} of the tokens in${row.missed_turns?.length ? `, missed by ${plural(row.missed_turns.length, "turn")}` : ""}`;
  const facts = factList([
    ["model", record.model_returned && record.model_returned !== record.model ? `${record.model} (${record.model_returned})` : record.model],
    ["turns", count(record.turns.length)],
    ["calls", !row.calls ? "" : row.failed_calls ? `${count(row.calls)}, ${count(row.failed_calls)} failed` : count(row.calls)],
    ["tokens", [[usage.input_tokens, "in"], [usage.output_tokens, "out"]].filter(([n]) => n).map(([n, way]) => `${short(n)} ${way}`).join(", ")],
    ["from a cache", cached],
    ["cost", record.cost_usd ? dollars(record.cost_usd) : ""], ["time at work", row.duration_s == null ? "" : seconds(row.duration_s)],
    ["ended", record.finished_at == null ? "" : moment(record.finished_at)], ["attempt", record.attempt > 1 ? count(record.attempt) : ""],
    ["sample", record.sample ? count(record.sample) : ""],
    ["toolsets", record.toolsets.join(", ")], ["sandbox", record.sandbox], ["image", record.image && record.image.reference],
    ["check", row.reward == null ? "" : checkWords(row)],
    ["rewards", row.rewards && Object.entries(row.rewards).map(([name, reward]) => `${name} ${digits(reward)}`).join(", ")],
    ["unusual", row.flags.filter((flag) => !["passed", "not passed"].includes(flag)).join(", ")],
  ]);
  const isWide = window.matchMedia("(min-width: 62rem)").matches;
  return h("aside", { "aria-label": "Facts" }, h("details", { open: isWide }, h("summary", {}, "Facts"), facts));
}

function foldsOf(record, form) {
  return h("div", { class: "folds" },
    form && fold(`facts training${form.file === "training" ? " is-row" : ""}`, trainingWords(form), () => trainingForm(form)),
    record.check && fold("facts check", "output of the check", () => checkBlock(record.check)),
    Object.keys(record.row).length ? fold("facts", "dataset row", () => jsonBlock(record.row)) : null,
    record.tools.length ? fold("facts", `tools offered (${record.tools.length})`, () => h("dl", { class: "arguments" }, record.tools.map((tool) => [
      h("dt", {}, tool.function.name), h("dd", {}, textBlock(tool.function.description ?? "")),
    ]))) : null,
    record.agent && fold("facts", "agent", () => jsonBlock(record.agent)),
    record.set_aside?.length ? fold("facts", `calls set aside by a restart (${record.set_aside.length})`, () => jsonBlock(record.set_aside)) : null,
    record.rewritten?.length ? fold("facts", `calls that were shown other messages (${record.rewritten.length})`, () => jsonBlock(record.rewritten)) : null,
    record.scores && fold("facts", `scores (${record.scores.length})`, () => jsonBlock(record.scores)),
    record.turns.length > 1 && record.turns.some((turn) => turn.usage?.input_tokens) && fold("facts", "tokens of each turn", () => tokensOf(record.turns)),
    fold("facts raw", "raw JSON", () => h("pre", { class: "text", tabindex: 0 }, jsonText(record))));
}

function setReasoning(isOpen) {
  isReasoningOpen = isOpen;
  for (const box of $("reader").querySelectorAll("details.reasoning")) box.open = isOpen;
}
