"""The toolset `web`."""
