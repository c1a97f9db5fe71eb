"""What a start would do, checked before any call.

plan     all checks of a start
preview  what a dry run shows
"""
