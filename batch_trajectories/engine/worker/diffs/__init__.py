"""What conversations changed in the repositories of their images.

diffs      the diffs of a worker's conversations
beginning  what is remembered before the model could change it
changes    what differs between a workspace and a fresh one
making     the general way: files are carried to a fresh workspace
plain      of files that were edited, added and removed: from their contents
objects    git's objects, without git
git        how git is run inside
"""
