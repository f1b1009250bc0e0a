"""Models larger than the device: weights rest on the host or on a disk, and reach the device layer by layer.

``shelf`` is the interface that the step and the engine see.  ``streamed`` copies layers to a GPU ahead of their use,
through ``lane``; ``mapped`` uses them in place, in a file, on the CPU.  ``region`` is the memory in which they rest,
``layout`` the order of their bytes.  ``memory`` divides the given memory, ``placing`` puts a model on its shelf.
"""

from __future__ import annotations

from .memory import Division, divide, least_division
from .placing import Offload, shelve, unshelve
from .shelf import Shelf, shelf_of

__all__ = ["Division", "Offload", "Shelf", "divide", "least_division", "shelf_of", "shelve", "unshelve"]
