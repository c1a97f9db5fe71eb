"""The parts that all formats of rows share, and the recipe of an export."""
