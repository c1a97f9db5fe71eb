"""The model APIs: how a request is written and a reply is read."""
