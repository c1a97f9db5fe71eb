"""A copy of a run in a bucket, or in a directory: imported where a URL is given.

A mirror is a log of parts, `URL/RUN_NAME/parts/NUMBER`. A part is created under the next number,
which fails where another machine has created it: the log has one writer at a time. See `mirror`.
"""
