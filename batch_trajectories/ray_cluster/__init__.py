"""Workers on the nodes of a Ray cluster: `--executor=ray`."""
