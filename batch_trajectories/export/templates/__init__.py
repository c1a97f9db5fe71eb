"""Chat templates of models, and rows as they render them.

names      finds templates by name, directory or file
rendering  renders messages and tools, and reports what is dropped
token_counts  counts tokens
contexts   compares each turn's context in a row with that of inference
fitting    has rows learn what a template shows as inference did, and fit a length

Other rooms import contexts, fitting, names, rendering, token_counts.
"""
