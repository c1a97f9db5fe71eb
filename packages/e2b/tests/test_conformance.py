"""The suite that every sandbox has to pass, on the loopback service."""

import pytest
from loopback import Loopback

from batch_trajectories.sandbox_conformance import *  # noqa: F403


@pytest.fixture
def name(service: Loopback) -> str:
    """The name of the sandbox."""
    return "e2b"
