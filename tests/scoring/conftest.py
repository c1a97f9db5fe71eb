"""Images of tasks, with real git and pytest."""

from __future__ import annotations

from tests.audit.conftest import images, task_images

__all__ = ["images", "task_images"]
