"""Buckets at s3, gs and az URLs, and directories at file URLs; imported where a URL is given.

bucket  create, read, list and remove objects
files   objects as files of a directory

Other rooms import all modules.
"""
