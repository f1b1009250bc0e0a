"""Models larger than the device: weights rest on the host or on a disk, and come layer by layer.

``shelf`` is what the step and the engine see of it.  ``streamed`` copies layers to a GPU ahead of their use, by way
of ``lane``; ``mapped`` uses them where they are, in a file, on the CPU.  ``region`` is the memory in which they rest,
``layout`` the order of their bytes.  ``memory`` divides a given amount, ``placing`` puts a model on its shelf.
"""

from __future__ import annotations

from .memory import Division, divide, least_division
from .placing import Offload, shelve, unshelve
from .shelf import Shelf, shelf_of

__all__ = ["Division", "Offload", "Shelf", "divide", "least_division", "shelf_of", "shelve", "unshelve"]
