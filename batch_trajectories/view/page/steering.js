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
}

function answered(words, isRefused = false) {
  $("steer-answer").className = isRefused ? "mark" : "";
  $("steer-answer").textContent = visible(words);
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

function showRunState() {
  const { run } = about;
  fill(($("state-mark").replaceChildren(), $("state-mark")), {}, [stateMark(run)]);
  fill(($("state-line").replaceChildren(), $("state-line")), {}, [
    run.tasks ? progressOf({ ...run, now: null }) : null, run.now ? h("span", { class: "soft" }, ` ${run.now.line}`) : stageOf(run),
  ]);
  $("run-state").hidden = !isAtWork(run); // the overview says all of a run that has ended
  $("steer").hidden = !run.can_steer;
  $("pause").textContent = run.state === "paused" ? "Resume" : "Pause";
  if (!run.now) $("flight").hidden = true;
}

function showFlight({ conversations, count: all }) {
  $("flight").hidden = !all;
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
  const lines = conversations.map(line);
  if (lines.length !== $("flight-rows").children.length || lines.some((row, n) => $("flight-rows").children[n] !== row)) $("flight-rows").replaceChildren(...lines);
}
