"""What a start would do, checked before any call."""
