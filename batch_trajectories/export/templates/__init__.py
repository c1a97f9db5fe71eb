"""Chat templates of models, and rows as they render them."""
