"""The tools `web_search` and `web_fetch`."""
