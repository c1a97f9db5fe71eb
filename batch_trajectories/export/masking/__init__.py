"""Turns that lose their loss but not their place, by the `mask` of a recipe.

options  the key `mask`
masks    the reasons for each turn of a record; turns masked and counted

Other rooms import masks, options.
"""
