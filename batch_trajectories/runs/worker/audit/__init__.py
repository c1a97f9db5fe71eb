"""The steps of an audit, carried out in the workspaces of a worker.

audit_runner  one step, from its workspace to its record
solving       applies the reference solution of a row
tamper        forges the result of a check, as an agent could
leaks         looks for the solution in the workspace and its image
"""
