"""What the web tools and the browser may reach."""
