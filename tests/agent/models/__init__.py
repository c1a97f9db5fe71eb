"""Tests of agent/models/: requests, replies, errors.

by_dialect            replies and requests that tests know of each dialect
test_models           requests, replies and the meaning of each failure
test_endpoint_words   why replies end and requests are refused, in the words of servers
test_model_faults     each fault of an endpoint, in each dialect, streamed and whole
test_tls              failures of TLS
test_usage            tokens and dollars that replies report, in the spellings of servers
test_chat_servers     what single servers of the OpenAI chat API write otherwise
test_odd_replies      values of any type in any field of a reply
test_reply_forms      replies in other forms than asked for, and streams that are left open
test_responses        the OpenAI Responses dialect
test_streaming        streamed replies give the same record as whole ones
test_event_stream     events of a stream, with their bytes
test_stream_parts     parts of a stream in any order and numbering
test_unknown_fields   unknown fields of a reply are kept and sent back
test_token_ids        token ids and logprobs: asked for, read, stored
test_unsupported_options  options that a model refuses
test_conversation_ids  the ids by which routers keep a conversation in one place
test_replicas         several replicas of one endpoint without a router
test_sdk_requests     requests and error codes as in the providers' own clients
test_clouds           clients of the SDKs against an endpoint whose tokens change
cloud_clients         those clients and that endpoint
test_keys             a key appears in no reply, message or file
test_seeds_models     behaviours of the seed documents, in model clients
"""
