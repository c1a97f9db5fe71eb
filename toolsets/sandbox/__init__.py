"""Where commands run.

base           the Sandbox protocol, limits, results and images
cgroup         control groups that limit processes and memory
programs       the programs inside as one text, and the Python that runs them
first_process  how the first process of a sandbox ends
channel        messages to the server inside, and which are allowed
fork_servers   warm processes that fork sandboxes
served         what all sandboxes have in common: a server inside that outlives calls
bwrap          commands in namespaces of their own, by bubblewrap
image_files    the files of an image, through the server inside
layer_files    the files of workspaces above one image, compared from outside
image_bwrap    commands in an unpacked image, by bubblewrap
local          commands as plain processes, without isolation
factory        finds a sandbox by its name and makes it
containers/    commands in containers of Docker or Podman
inside/        the programs that run inside a sandbox

Other rooms import base, bwrap, cgroup, containers/engine, factory, image_files, inside/outputs,
layer_files, programs.
"""

SANDBOXES = {
    "bwrap": "toolsets.sandbox.bwrap:BwrapSandbox",
    "docker": "toolsets.sandbox.containers.docker:DockerSandbox",
    "local": "toolsets.sandbox.local:LocalSandbox",
}
"""Our sandboxes by name: where the class of each is. Packages add others, see `factory`."""
