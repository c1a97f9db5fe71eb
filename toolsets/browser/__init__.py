"""The toolset `browser`.

browser_tools     the tools
session           the pages of one conversation
process           the Chromium that conversations share
proxy             Chromium's only way to the network
browser_launcher  starts Chromium, and kills it when its worker ends
"""
