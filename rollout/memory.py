"""The memory that tensors lie in: given back as a whole, and taken again under the same tensors.

The tensors and all views of them stay what they are meanwhile, without memory. Their addresses change, but for plain
memory that numpy has seen, which torch does not free: there the system takes the pages, and gives others with zeros.
"""

import ctypes
import mmap
from collections.abc import Iterable

import torch
from torch import Tensor


class TensorMemory:
    """Of some tensors; those that share memory count once."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        storages = (tensor.untyped_storage() for tensor in tensors)
        self._storages = list({storage.data_ptr(): storage for storage in storages}.values())
        self._sizes = [storage.nbytes() for storage in self._storages]
        self.released = False

    def release(self) -> int:
        """Give all of it back to the system or to CUDA, unless that is done; the bytes given back."""
        if self.released:
            return 0
        self.released = True
        for storage in self._storages:
            if storage.resizable():
                storage.resize_(0)
            else:
                _give_pages_back(storage.data_ptr(), storage.nbytes())
        return_freed()
        torch.cuda.empty_cache()
        return sum(self._sizes)

    def reclaim(self) -> None:
        """Take as much again, holding anything. Does nothing if it was not released."""
        if self.released:
            for storage, size in zip(self._storages, self._sizes, strict=True):
                if storage.resizable():
                    storage.resize_(size)
            self.released = False


def has_memory(tensor: Tensor) -> bool:
    return tensor.untyped_storage().nbytes() > 0


def _give_pages_back(address: int, nbytes: int) -> None:
    """All whole pages in a range of anonymous memory; what is read there next is zero."""
    page = mmap.PAGESIZE
    first, end = -(-address // page) * page, (address + nbytes) // page * page
    libc = ctypes.CDLL(None, use_errno=True)
    if end > first and libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), mmap.MADV_DONTNEED):
        raise OSError(ctypes.get_errno(), "madvise")


def return_freed() -> None:
    """The C library of GNU keeps freed blocks of up to 32 MiB until it is told to return them."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
