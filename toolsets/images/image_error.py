"""The failure of an image, which is not a failure of the machine."""

from batch_trajectories.basics.errors import ToolError


class ImageError(ToolError):
    """An image is missing, damaged, or holds what cannot be unpacked."""
