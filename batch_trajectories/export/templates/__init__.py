"""Chat templates of models, and how they render rows."""
