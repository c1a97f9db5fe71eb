"""Container images in a directory: found by name or digest, and unpacked once each."""
