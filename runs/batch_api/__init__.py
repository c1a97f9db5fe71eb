"""Model calls sent through the providers' Batch APIs, in the parent process."""
