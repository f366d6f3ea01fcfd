"""The delta codec: layouts, digests, cell codecs, patches, squash. Pure: bytes in, bytes out."""
