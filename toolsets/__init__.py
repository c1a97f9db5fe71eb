"""Tools that an agent can call, the toolsets that group them, and the sandboxes they run in."""
