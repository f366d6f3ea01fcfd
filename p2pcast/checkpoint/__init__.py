"""Hugging Face checkpoint folders: read with total validation, written whole or not at all."""

from p2pcast.checkpoint.folder import Checkpoint, write_folder
from p2pcast.checkpoint.safetensors_file import SafetensorsFile, header_for, parse_header

__all__ = ["Checkpoint", "SafetensorsFile", "header_for", "parse_header", "write_folder"]
