"""The addresses that web tools and the browser may reach."""
