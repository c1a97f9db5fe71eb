"""The toolset `web`.

web_tools  web_search and web_fetch
search     the search providers
http       downloads with limits; checks every redirect
page       the main text of a page
cache      pages and search results on disk
"""
