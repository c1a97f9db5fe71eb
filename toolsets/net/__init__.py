"""What web tools and the browser may reach.

guard         checks each address when a socket connects to it
web_settings  the settings of the web tools
"""
