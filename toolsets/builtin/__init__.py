"""The tools of the toolsets `file`, `terminal` and `python`.

file            read, write, patch, list and search files
terminal        run shell commands and Python
command_result  a command's result as the model sees it
"""
