"""The providers' Batch APIs.

base       what a provider's batches can do
calls      single calls as items of a batch
transfer   files to and from a provider
openai     OpenAI's batches
anthropic  Anthropic's batches
"""
