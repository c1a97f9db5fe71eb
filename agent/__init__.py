"""One conversation: messages, model clients, the loop, and the trajectory that it leaves.

messages       messages and events, as they are stored
tokens         token ids and log-probabilities as they were sampled
parts          parts of messages that are not text
reasoning      reasoning inside the text of a reply, and encrypted reasoning
deadline       the time limit of a conversation
stream_events  events for a caller while a conversation runs
options        the options of a conversation
command_agent  an agent that users run as a command
models/        model clients behind one protocol
gateway/       model calls of agents that run as commands
state/         the state of a conversation: a fold of its events
loop/          deciding and taking the next step
views/         models around a model that change the messages it is shown
setup          model, tools, subagents and hooks, checked before any call
runner         assembles one conversation and runs it
session        several prompts to one agent, for AIAgent
flat/          conversations as flat lists, for callers with a loop of their own

Other rooms import only the modules in `SEAM`.
"""

SEAM = (
    "command_agent",
    "gateway.answers",
    "gateway.conversations.lines",
    "gateway.listing",
    "gateway.relay",
    "gateway.server",
    "gateway.wire",
    "gateway.wires",
    "loop.loop",
    "loop.opening",
    "loop.references",
    "loop.rules",
    "loop.steps",
    "loop.tools",
    "messages",
    "models.admission",
    "models.batches.base",
    "models.batches.calls",
    "models.client.key_command",
    "models.client.open_model",
    "models.client.pool",
    "models.client.retrying",
    "models.connection",
    "models.errors",
    "models.model",
    "models.parsing",
    "models.prices",
    "models.providers",
    "models.proxies",
    "models.resolve",
    "models.scripted",
    "options",
    "parts",
    "reasoning",
    "runner",
    "session",
    "setup",
    "state.final_answer",
    "state.forking",
    "state.history",
    "state.trajectory",
    "stream_events",
    "tokens",
    "views.views",
)
