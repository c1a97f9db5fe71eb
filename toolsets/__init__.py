"""Tools the agent may call, the toolsets that group them, and the sandboxes that confine them."""
