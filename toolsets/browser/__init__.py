"""The toolset `browser`."""
