"""Conversations that other programs have stored, as records of a run: the command `import`."""
