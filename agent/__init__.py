"""One conversation: messages, model clients, the loop, and the trajectory that it leaves.

messages       messages and events, as they are stored
reasoning      reasoning that stands inside text
deadline       the seconds that a conversation may take
stream_events  what a caller hears while a reply streams
options        the options of a conversation
models/        model clients behind one protocol
state/         the state of a conversation: a fold of its events
loop/          deciding and taking the next step
views/         models around a model, which change what it is shown
setup          what a conversation is set up with, checked before any call
runner         puts one conversation together and runs it
session        prompts one after the other, for AIAgent
flat/          conversations as flat lists, for callers with a loop of their own

Other rooms import only the modules in `SEAM`.
"""

SEAM = (
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
    "reasoning",
    "runner",
    "session",
    "setup",
    "state.final_answer",
    "state.forking",
    "state.history",
    "state.tally",
    "state.trajectory",
    "stream_events",
    "views.summary",
    "views.views",
)
