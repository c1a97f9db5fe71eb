"""One conversation: messages, model clients, the loop, and the trajectory that it leaves.

messages/      messages and events, as they are stored
options        the options of a conversation
models/        model clients behind one protocol
wires/         what agents that run as commands ask
gateway/       the server that they ask, and the relay of their calls
state/         the state of a conversation: a fold of its events
loop/          deciding and taking the next step
views/         models around a model that change the messages it is shown
setup          model, tools, subagents and hooks, checked before any call
runner         assembles one conversation, and runs or resumes it
session        several prompts to one agent, for AIAgent
flat/          conversations as flat lists, for callers with a loop of their own

Other rooms import loop/loop, loop/references, loop/rules, loop/steps, loop/tools, options,
runner, session, setup, views/views.
"""
