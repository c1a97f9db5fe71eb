"""The providers' Batch APIs.

base            what a provider's batches can do
calls           single calls as items of a batch
sdk_connection  clients of the openai and anthropic packages over our connections
openai          OpenAI's batches
anthropic       Anthropic's batches

Other rooms import base, calls.
"""
