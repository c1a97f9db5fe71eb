"""The lists that commands print.

tool_list      toolsets and tools
endpoint_list  endpoints and their keys
"""
