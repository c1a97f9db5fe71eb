"""What a format of rows is, and what formats share."""
