"""The model APIs: how a request is written and a reply is read.

registry                   the dialects by name
assembly                   from the events of a stream to the body of a whole reply
token_ids                  token ids and log-probabilities of the chat dialect
unknown_fields             fields that a reply holds beyond those that we know
openai_chat                OpenAI chat completions
openai_chat_stream         the same, streamed
openai_responses           OpenAI Responses
openai_responses_stream    the same, streamed
anthropic_messages         Anthropic messages
anthropic_messages_stream  the same, streamed
gemini                     Gemini's generateContent: replies only
gemini_stream              the same, streamed

Other rooms import anthropic_messages, assembly, gemini, openai_chat, openai_responses,
registry, token_ids.
"""
