"""flash-attention's functions on the bundled kernels: ``from flashbench.flash_attn import flash_attn_func``.

The same names and arguments, so that code that calls the flash-attn package can be measured, and run where
it is not installed, with one import changed (docs/flash-attn.md).
"""

from flashbench.kernels._drop_in import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
)
from flashbench.kernels._drop_in_cache import flash_attn_with_kvcache
from flashbench.kernels._drop_in_packed import (
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]
