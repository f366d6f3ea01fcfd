"""The delta codec: layouts, digests, cell codecs, patches, squash. Pure: bytes in, bytes out.

The public surface is ``layout``, ``cell`` (encode, decode, apply, digest) and ``squash``. The package does not import
these modules itself, so that reading a layout does not load the compiler.
"""
