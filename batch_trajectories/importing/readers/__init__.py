"""What other programs store, read as conversations: one module per format, found by its name.

atif         documents of Harbor's Agent Trajectory Interchange Format
openai       rows of messages in OpenAI's form
sharegpt     rows of `from` and `value`
claude_code  session files of Claude Code
codex        session files of Codex

A module has a `READER`; see `Reader` in `importing/conversation.py`.
"""
