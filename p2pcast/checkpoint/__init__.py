"""Hugging Face checkpoint folders: validated completely when read, written completely or not at all."""

from p2pcast.checkpoint.folder import Checkpoint, write_folder
from p2pcast.checkpoint.safetensors_file import SafetensorsFile, header_for, parse_header

__all__ = ["Checkpoint", "SafetensorsFile", "header_for", "parse_header", "write_folder"]
