"""Rows as the model saw them, for `export --segments`.

views     what each call of a record was shown
segments  calls joined, as long as each one only adds to what the one before was shown
rows      segments as conversations that formats can render

Other rooms import rows, views.
"""
