"""Model clients behind one protocol: `Model.complete(request) -> Completion`.

model        the protocol, requests, completions and settings
errors       failed calls: their kinds, and what each leads to
error_bodies  what endpoints say when they refuse
endpoint_words  words for endings and errors, with their meanings (endpoint_words.toml)
admission    where a call waits for its turn
providers    the table of providers and servers that a prefix can name
connection   headers, proxies and credentials beyond the key
conversation_id  ids by which endpoints keep a conversation in one place
sdk_clients  clients of the openai and anthropic packages, for clouds
keys         API keys, kept out of all that is written
parsing      reading what endpoints send
usage        what replies say that they used: tokens and dollars
prices       what a call costs
deadline     the time limit of a conversation
stream_events  events for a caller while a reply arrives
resolve      from `--model` to provider, URL and key
scripted     a model that plays given turns
bodies/      what dialects share
dialects/    the APIs: how requests are written and replies read
client/      HTTP, retries, connections
batches/     the providers' Batch APIs

Other rooms import all modules.
"""
