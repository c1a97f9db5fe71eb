"""Which conversations become training rows.

filters        the filters of a recipe
duplicates     equal and nearly equal conversations
contamination  overlap with benchmarks
evaluation_sets  the questions of benchmarks
secrets        API keys and the like

Other rooms import contamination, duplicates, filters.
"""
