"""What conversations changed in the repositories of their images."""
