"""Which conversations become training rows.

filters        the filters of a recipe
duplicates     equal and nearly equal conversations
contamination  questions of an evaluation
secrets        API keys and the like
asking         keeps calls in flight
judge          asks a judge model
verdicts       its replies on disk
"""
