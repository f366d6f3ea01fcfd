"""The delta codec: layouts, digests, cell codecs, patches, squash. Pure: bytes in, bytes out.

The public surface is ``layout``, ``cell`` (encode, decode, apply, digest) and ``squash``. It is not imported here, so that reading a layout
does not load the compiler.
"""
