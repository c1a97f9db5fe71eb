"""The report page: data, script and style of one HTML file."""
