"""What runs inside a sandbox, as programs of their own; they import nothing outside this folder.

In a container the server is run by the Python of the image, so it uses only the standard
library of Python 3.8. `toolsets.sandbox.programs` starts programs from their source.
"""
