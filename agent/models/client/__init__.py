"""Calls over HTTP.

key_command          keys that a command prints
prepared             requests whose URL or credentials change
call_timeouts        time limits of calls in flight
event_stream         server-sent events
reply_bodies         the body of a reply, whole or as a stream
relayed              calls whose requests other programs wrote
tls                  why TLS failed
transport            one request and its reply
unsupported_options  options that an endpoint refuses are left out
replicas             which replica answers a conversation: decisions alone
fleet                the replicas of an endpoint: connections, limits, health
endpoint             a model at an endpoint, without retries
retrying             retries, and waiting for a turn
open_model           all of these together
pool                 the open models of a process

Other rooms import key_command, open_model, pool, prepared, relayed, reply_bodies, retrying,
transport.
"""
