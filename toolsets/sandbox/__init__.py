"""Where commands run: bwrap, docker, or plain processes."""
