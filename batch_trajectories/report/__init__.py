"""Show runs to people.

formatting         numbers, times and texts for a terminal
facts              a conversation as a row of the report's table
conversation_text  a conversation as text for a terminal
status             the status of a run, and of the runs in a directory
live               the full-screen view beside a run
comparison         two runs side by side
rejudged           the verdicts of a run that `check` changed
page/              the report page

Other rooms import comparison, conversation_text, facts, formatting, live, page/frame,
page/writer, rejudged, status.
"""
