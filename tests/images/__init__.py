"""Working in container images."""
