"""What runs inside a sandbox, as programs of their own; they import nothing outside this package.

In a container they are run by whatever Python the image holds, so they use only the standard
library of Python 3.8, and of that little, since each task has them once. `toolsets.sandbox.served`
starts them from their source.
"""
