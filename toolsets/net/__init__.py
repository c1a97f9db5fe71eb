"""What web tools and the browser may reach.

guard         judges addresses where sockets connect
web_settings  the settings of the web tools
"""
