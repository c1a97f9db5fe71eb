"""Conversations that other programs have stored, as records of a run: the command `import`.

conversation   what a source holds, and the record that it becomes
sources        files, rows and readers of sources
readers/       one module per format
importing      writes rows and records into a run directory

Other rooms import importing.
"""
