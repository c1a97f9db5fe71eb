"""Where commands run."""

SANDBOXES = {
    "bwrap": "toolsets.sandbox.bwrap:BwrapSandbox",
    "docker": "toolsets.sandbox.containers.docker:DockerSandbox",
    "local": "toolsets.sandbox.local:LocalSandbox",
}
"""Our sandboxes by name: where the class of each is. Packages add others, see `factory`."""
