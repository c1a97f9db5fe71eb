"""Models around a model: they change the messages it is shown, never the record."""
