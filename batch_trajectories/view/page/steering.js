// What changes a run that works, and what the run answered.

const LIMITS = ["rpm", "max_in_flight", "max_run_cost_usd"];

function startSteering() {
  $("pause").addEventListener("click", () => steer({ do: about.run.state === "paused" ? "resume" : "pause" }));
  $("retry").addEventListener("click", () => steer({ do: "retry" }));
  $("limits").addEventListener("submit", (event) => {
    event.preventDefault();
    const given = LIMITS.filter((name) => $(`limit-${name}`).value !== "").map((name) => [name, Number($(`limit-${name}`).value)]);
    if (given.length) steer({ do: "limits", ...Object.fromEntries(given) });
    else answered("Give a number first.");
  });
  $("steer-seen").addEventListener("click", () => answered(""));
  $("show-steering").addEventListener("click", () => openSteering(!$("run-state").classList.contains("open")));
}

// On a narrow screen, where what steers is below a button.
function openSteering(isOpen) {
  $("run-state").classList.toggle("open", isOpen);
  $("show-steering").setAttribute("aria-expanded", String(isOpen));
}

// What the run said lies over what is below it, so that nothing moves.
function answered(words, isRefused = false) {
  $("steer-said").hidden = !words;
  $("steer-said").classList.toggle("mark", isRefused);
  $("steer-answer").textContent = visible(words);
  if ($("live-answer")) $("live-answer").textContent = visible(words);
}

async function steer(request) {
  answered("asking the run …");
  try {
    const { answer } = await ask(runPath("/steer"), request);
    answered(answer);
  } catch (error) {
    answered(error.message, true);
  }
}

function stopConversation(id) {
  return steer({ do: "stop", id });
}

// What a run does now, besides the numbers on top of the page.
function workWords({ running, turns_per_s: turns, input_tokens_per_s: input, output_tokens_per_s: output, limit }) {
  const rate = turns == null ? null : `${digits(turns)} turns/s`;
  const tokens = input || output ? `tokens/s ${short(Math.round(input))} in, ${short(Math.round(output))} out` : null;
  return [`${count(running)} running`, limit, rate, tokens].filter(Boolean).join(" · ");
}

function showRunState() {
  const { run } = about;
  fill(($("state-mark").replaceChildren(), $("state-mark")), {}, [stateMark(run)]);
  fill(($("state-line").replaceChildren(), $("state-line")), {}, [
    run.tasks ? progressOf({ ...run, now: null }) : null, run.now ? h("span", { class: "soft" }, ` · ${workWords(run.now)}`) : stageOf(run),
  ]);
  $("state-line").title = visible(run.now?.line ?? "");
  $("run-state").hidden = !isAtWork(run); // the overview says all of a run that has ended
  $("steer").hidden = !run.can_steer;
  $("retry").disabled = !run.failed;
  $("pause").textContent = run.state === "paused" ? "Resume" : "Pause";
  if (!isAtWork(run)) showFlight({ conversations: [], count: 0 });
}

function showFlight({ conversations, count: all }) {
  $("flight-count").textContent = count(all);
  const rowsBy = new Map([...$("flight-rows").children].map((row) => [row.dataset.id, row]));
  const line = (one) => {
    const row = rowsBy.get(one.id) ?? h("tr", { "data-id": one.id },
      h("th", { scope: "row" }, h("a", { href: source.link(one.id) }, one.id)), h("td", { class: "number" }), h("td", {}),
      h("td", {}, about.run.can_steer && h("button", { type: "button", "aria-label": `stop ${one.id}`, click: () => stopConversation(one.id) }, "Stop")));
    row.children[1].textContent = count(one.turns);
    row.children[2].textContent = visible(`${one.doing === "tools" ? one.tool ?? (one.calls ?? []).join(", ") : "model"} for ${seconds(one.idle_s)}`);
    return row;
  };
  const lines = conversations.length ? conversations.map(line) : [h("tr", {}, h("td", { colspan: 4, class: "soft" }, "none at this moment"))];
  if (lines.length !== $("flight-rows").children.length || lines.some((row, n) => $("flight-rows").children[n] !== row)) $("flight-rows").replaceChildren(...lines);
}
