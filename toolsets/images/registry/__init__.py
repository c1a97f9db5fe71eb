"""Images from registries, by their HTTP protocol, into a directory of images."""
