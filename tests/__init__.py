"""Tests, in folders as the program's. `fakes`, `helpers` and `benchmarks` hold what is no test."""
