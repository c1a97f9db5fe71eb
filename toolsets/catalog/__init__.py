"""All toolsets, and the choice of those a task gets.

registry       the built-in toolsets; adding others; choosing by name
custom         a user's own tools: functions, Tools and Toolsets
places         imports what an option names
distributions  toolsets drawn by percentages
"""
