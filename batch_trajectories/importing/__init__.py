"""Conversations that other programs have stored, as records of a run: the command `import`.

conversation   what a source holds, and the record that it becomes
call_forms     tools, calls and results in the forms of published files
tagged_text    calls and results in the texts of models
chat_rows      rows of messages, in the forms of OpenAI, ShareGPT and trainers
sources        files, rows and readers of sources
readers/       one module per format
importing      writes rows and records into a run directory

Other rooms import importing.
"""
