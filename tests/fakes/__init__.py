"""Fake endpoints and other parts that tests and benchmarks share. The product never imports it.

fake_endpoint   a model endpoint on loopback that plays scripted conversations and counts calls
fake_answers    how it reads a request and writes the answer, byte by byte
fake_dialects   its OpenAI chat and Anthropic messages dialects
fake_responses  its OpenAI Responses dialect
fake_script     requests and replies in dialect-free types, and its options
fake_tokens     its token ids and log-probabilities
fake_caches     its prompt cache
fake_faults     the faults that it can play, by name and family
fake_router     a router before several endpoints
fake_hub        a dataset on loopback as the Hugging Face hub offers it
fake_batches    the batch APIs of OpenAI and Anthropic on loopback
agent_endpoint  a model on loopback for agents that run as commands, with a log of its own
scripted_agent  a small agent that runs as a command
fake_images     container images made of files of this machine
served          a server on loopback in a thread
quick_endpoint  an endpoint that does as little as possible, for measurements
bit_flips       flips single bits of a finished run and records what the commands notice
trainers/       what checks by real trainers share
ray_cluster     a Ray cluster of two nodes on this machine
"""
