"""Which toolsets there are, and which a task gets.

registry       the toolsets of this program, and choosing by name
lookup         those and a user's own, together
custom         a user's own tools: functions, Tools and Toolsets
distributions  toolsets drawn by percentages
"""
