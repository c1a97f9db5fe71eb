"""The directory that a conversation works in.

workspace  file access that never leaves one directory
removal    removes a tree that commands may have made hard to remove
"""
