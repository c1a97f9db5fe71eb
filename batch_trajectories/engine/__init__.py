"""One run: its plan, its directory, the parent process and its workers.

The engine knows no feature: `features.py` says where each is.
"""
