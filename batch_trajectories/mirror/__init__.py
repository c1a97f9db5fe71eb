"""A copy of a run in a bucket, or in a directory; imported only if a URL is given.

A mirror is a log of parts, `URL/RUN_NAME/parts/NUMBER`. A part is created under the next number.
That fails if another machine has created it, so the log has one writer at a time. See `mirror`.
"""
