"""Which conversations become training rows.

filters        the filters of a recipe
duplicates     equal and nearly equal conversations
contamination  questions of an evaluation
secrets        API keys and the like

Other rooms import duplicates, filters.
"""
