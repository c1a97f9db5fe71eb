"""A copy of a run in a bucket, or in a directory: imported where a URL is given.

A mirror is a log of parts, `URL/RUN_NAME/parts/NUMBER`. A part is created under the next number,
which fails where another machine has created it: the log has one writer at a time. See `mirror`.

parts   what a part holds
tail    what a run directory has and its mirror has not
copies  a directory that follows a mirror; copies for commands that read
mirror  the lease, and the thread that sends

Other rooms import copies, mirror.
"""
