"""The directory that a conversation works in.

workspace  files below one root, reached without leaving it
removal    removing a tree that resists
"""
