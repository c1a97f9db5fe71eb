"""Model clients behind one narrow seam: `Model.complete(messages, tools) -> Completion`."""
