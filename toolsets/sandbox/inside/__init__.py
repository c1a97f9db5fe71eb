"""Programs that run inside a sandbox; they import nothing outside this folder.

In a container the image's Python runs the server, so it uses only the standard library of Python
3.8. `toolsets.sandbox.programs` starts programs from their source.
"""
