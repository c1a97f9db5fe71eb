"""Versions of packages, read without their descriptions."""

from __future__ import annotations

from importlib import metadata

import pytest

from batch_trajectories.basics.versions import installed_version


@pytest.mark.parametrize("package", ["aiohttp", "batch-trajectories", "PyYAML", "orjson"])
def test_a_version_is_that_of_the_package(package: str) -> None:
    assert installed_version(package) == metadata.version(package)


def test_a_package_that_is_not_installed_has_none() -> None:
    assert installed_version("no-such-package-of-anybody") is None
