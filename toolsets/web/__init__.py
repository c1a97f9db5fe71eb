"""The toolset `web`.

web_tools  web_search and web_fetch, and their cache
search     the search providers
http       downloads with limits; checks every redirect
page       the main text of a page
"""
