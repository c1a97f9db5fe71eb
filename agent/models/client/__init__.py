"""HTTP to an endpoint: connections, retries, options that it refuses."""
