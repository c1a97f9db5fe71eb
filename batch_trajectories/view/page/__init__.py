"""The page of `view`: that of the report, whose data comes from the server."""
