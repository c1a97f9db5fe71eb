"""Looking at runs.

formatting         numbers and times for people
facts              what the report's table knows of a conversation
conversation_text  one conversation in the terminal
status             the command `status`
live               the whole-screen view
comparison         two runs side by side
page/              the report page

Other rooms import only the modules in `SEAM`.
"""

SEAM = (
    "comparison",
    "conversation_text",
    "formatting",
    "live",
    "page.writer",
    "status",
)
