"""The dialects of model APIs: each module `NAME.py` is one, and `DIALECT` in it is what it does.

See `agent/models/dialects/dialect.py`; streamed replies of NAME are put together in `NAME_stream.py`.

Other rooms import anthropic_messages, gemini, openai_chat, openai_responses.
"""
