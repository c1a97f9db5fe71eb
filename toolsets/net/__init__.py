"""What web tools and the browser may reach."""
