"""The changes of conversations to the repositories in their images."""
