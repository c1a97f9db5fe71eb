"""Tests of toolsets/: what tools do, how they are found, and what confines them.

test_validation        what pydantic rejected, in words
test_tool              the tool decorator, the derived schema, the check of arguments
test_toolbox           every failure of a call becomes a result that the model can read
test_toolsets          the built-in toolsets and their selection
test_distributions     toolsets drawn for each task
test_custom_tools      a user's own functions as tools
test_packing           packed workspaces come back whole
test_workspace         paths stay beneath the root of the workspace
test_closing          closing several resources of which one fails
test_conformance       what every sandbox has to do, for ours
test_sandbox           resources and reach of a command
test_sandbox_limits    shared memory, the first process, refused limits
test_sandbox_siblings  sandboxes forked by one server share nothing
test_system_calls      what the kernel refuses to commands
test_jobs              what a sandbox's server sends a process, and waits for
test_installed         programs of the user in a sandbox
test_forward           connections that leave a sandbox through a socket
test_docker            the docker sandbox
test_leftovers         what containers leave when a run is killed
test_terminal          one shell and one interpreter per task
test_mcp               MCP servers as toolsets
test_browser           the toolset browser
test_web_fetch         pages: reach, limits, text
test_web_search        search providers
test_web_cache         fetched pages stay the same for a run
"""
