"""The directory that a conversation works in.

files      what every kind of workspace can do
workspace  file access that never leaves one directory
packing    packs its files into one that is named by its content
removal    removes a tree that commands may have made hard to remove

Other rooms import files, packing, removal, workspace.
"""
