"""Tests of cli/: what commands print.

test_command_line   help and shell completion
test_endpoint_list  `endpoints`
test_build_images   `build_images`
test_preview        `--dry_run`
test_forecast       `estimate`
test_looking        `show`, `compare`, `status`
test_live           `--live`
"""
