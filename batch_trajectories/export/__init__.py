"""From records to training files."""
