"""The delta codec: layouts, digests, cell codecs, patches and squashes. Pure: bytes in, bytes out.

The public modules are ``layout``, ``cell`` (encode, decode, apply, digest) and ``squash_cell``. The package does not
import them itself, so that reading a layout does not load the compiler.
"""
