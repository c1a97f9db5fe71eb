"""The toolset `web`.

web_tools  web_search and web_fetch
search     the search providers
http       downloads, with limits and redirects judged
page       the main text of a page
cache      pages that were fetched before
"""
