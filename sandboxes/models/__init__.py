"""One file per noun. Only services write these rows."""

from .image import Image, ImageBuild
from .sandbox import Sandbox

__all__ = ["Image", "ImageBuild", "Sandbox"]
