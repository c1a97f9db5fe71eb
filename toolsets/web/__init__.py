"""The toolset `web`.

web_tools  web_search and web_fetch, their cache, the search providers
charsets   the encodings of the web, by their labels
http       downloads with limits; checks every redirect; the main text of a page
"""
