"""Model clients behind one protocol: `Model.complete(request) -> Completion`."""
