"""The dialects of model APIs: `NAME.py` is a dialect if it has a `DIALECT`; see `dialect.py`."""
